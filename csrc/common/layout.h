// The data between the stages, in C++: mirrors bytesplat_ns/ops/layout.py, name by name.
#pragma once

namespace bytesplat {

constexpr int TILE = 16;  // side of a square tile, pixels

constexpr float ALPHA_MIN = 1.0f / 255.0f;        // contributions below are skipped
constexpr float ALPHA_MAX = 0.999f;               // one Gaussian at one pixel is never more opaque
constexpr float TRANSMITTANCE_MIN = 1e-4f;        // a pixel whose transmittance would fall to this or below is saturated

// Columns of a record, and of dL/d(record) in a gradient row. float32.
constexpr int MEAN2D = 0;   // x, y: pixels
constexpr int CONIC = 2;    // a, b, c of [[a, b], [b, c]]: 1 / pixel^2
constexpr int OPACITY = 5;  // after sigmoid and compensation
constexpr int RGB = 6;      // red, green, blue, not below zero
constexpr int DEPTH = 9;    // camera z, world units
constexpr int RECORD_WIDTH = 10;

// Columns of a gradient row behind those of the record: the statistics of densification and pruning.
constexpr int ABSGRAD = 10;           // x, y: sum over pixels of |dL/d mean2d of that pixel|
constexpr int IMPORTANCE = 12;        // sum over pixels of alpha T
constexpr int MAX_CONTRIBUTION = 13;  // max over pixels of alpha T
constexpr int ROW_WIDTH = RECORD_WIDTH;
constexpr int ROW_WIDTH_WITH_STATISTICS = 14;

// Of the statistics that density control keeps.
constexpr float GRADIENT_UNIT = 1.0f / 4294967296.0f;  // of the summed screen gradient
constexpr float GRADIENT_MAX = 65536.0f;               // largest screen gradient of one view that counts

// What happens to the Gaussian that saturates a pixel.
enum class StopRule : int {
    drop = 0,  // it is left out and the pixel stops (3DGS, gsplat)
    add = 1,   // it is added, then the pixel stops
};

}  // namespace bytesplat
