// The unit of rasterization: a strip of LANES x TILE pixels of a tile, one row of it a vector. (With AVX-512 a strip is
// the whole tile, with AVX2 half of it.) A strip walks the tile's list on its own, row after row of each record.
#pragma once
#include "simd.h"

#include <vector>

#include "../common/blend.h"
#include "../common/ellipse.h"

namespace bytesplat {

constexpr int STRIPS = TILE / LANES;

// What both directions read. Images have the size of the largest view of the round.
struct RasterInput {
    int views, width, height;
    const int32_t* sizes;     // [V, 2] width, height
    const float* table;       // [M, RECORD_WIDTH]
    int64_t record_count;
    const int64_t* offsets;   // [tiles + 1]
    const int32_t* records;   // [P]
    const float* interval;    // [V, H, W, 2] z_in, z_out, or null
    int stop;                 // a StopRule

    int tiles_x() const { return (width + TILE - 1) / TILE; }
    int tiles_y() const { return (height + TILE - 1) / TILE; }
    int64_t tiles() const { return int64_t(views) * tiles_x() * tiles_y(); }

    // [M] largest sigma of each record that reaches ALPHA_MIN.
    std::vector<float> thresholds(int threads) const {
        std::vector<float> result(record_count);
#pragma omp parallel for num_threads(threads)
        for (int64_t i = 0; i < record_count; ++i) result[i] = ellipse_threshold(table[RECORD_WIDTH * i + OPACITY]);
        return result;
    }
};

// Where a strip lies.
struct Strip {
    int64_t tile, first_pixel;  // index of the strip's first pixel in [V, H, W]
    int x, y;                   // of that pixel in the view
    int columns, rows;          // pixels inside the image's memory
    int inside_columns, inside_rows;  // pixels inside the view

    Strip(const RasterInput& in, int64_t tile, int strip) : tile(tile) {
        const int64_t view = tile / (in.tiles_x() * in.tiles_y());
        const int in_view = int(tile % (in.tiles_x() * in.tiles_y()));
        x = in_view % in.tiles_x() * TILE + strip * LANES;
        y = in_view / in.tiles_x() * TILE;
        first_pixel = (view * in.height + y) * in.width + x;
        columns = clamp(in.width - x, 0, LANES);
        rows = clamp(in.height - y, 0, TILE);
        inside_columns = clamp(in.sizes[2 * view] - x, 0, columns);
        inside_rows = clamp(in.sizes[2 * view + 1] - y, 0, rows);
    }

    bool contains(int row, int lane) const { return row < inside_rows && lane < inside_columns; }
};

// A record seen from a strip; everything in it is constant along rows.
struct Splat {
    Floats dx;  // from the mean to the pixel centres of a row
    float first_dy;
    Floats across, slope, half_c;  // sigma = across + dy (slope + dy half_c)
    Floats opacity;
    const float* record;

    Splat(const float* record, const Strip& strip)
        : dx(lane_numbers() + (float(strip.x) + 0.5f - record[MEAN2D])),
          first_dy(float(strip.y) + 0.5f - record[MEAN2D + 1]),
          across(0.5f * record[CONIC] * dx * dx),
          slope(record[CONIC + 1] * dx),
          half_c(broadcast<Floats>(0.5f * record[CONIC + 2])),
          opacity(broadcast<Floats>(record[OPACITY])),
          record(record) {}

    Floats dy(int row) const { return broadcast<Floats>(first_dy + float(row)); }

    Floats visibility(Floats dy) const { return exp_minus(blend_sigma(across, slope, half_c, dy)); }

    // The rows that the ellipse { sigma <= threshold } reaches between the strip's first and last pixel centre, one bit
    // each. Slightly wide, so that only the pixels themselves decide.
    uint32_t reached_rows(float threshold) const {
        const Floats a = broadcast<Floats>(record[CONIC]), b = broadcast<Floats>(record[CONIC + 1]),
                     c = broadcast<Floats>(record[CONIC + 2]);
        const Floats left = broadcast<Floats>(dx[0]), right = broadcast<Floats>(dx[LANES - 1]);
        uint32_t rows = 0;
        for (int row = 0; row < TILE; row += LANES) {
            const Floats least = row_sigma(a, b, c, left, right, lane_numbers() + (first_dy + float(row)));
            rows |= bits(least <= 1.0001f * threshold + 0.001f) << row;
        }
        return rows;
    }
};

// Pixels of a strip at rest, before the first record.
struct StripState {
    Floats transmittance[TILE];     // sign and meaning: blend_step
    Floats z_in[TILE], z_out[TILE];  // depth interval, only set where there is one

    StripState(const RasterInput& in, const Strip& strip) {
        for (int row = 0; row < TILE; ++row)
            for (int lane = 0; lane < LANES; ++lane) {
                const bool inside = strip.contains(row, lane);
                transmittance[row][lane] = inside ? 1.0f : -1.0f;
                if (in.interval == nullptr) continue;
                const float* pixel = in.interval + 2 * (strip.first_pixel + int64_t(row) * in.width + lane);
                z_in[row][lane] = inside ? pixel[0] : 0.0f;
                z_out[row][lane] = inside ? pixel[1] : 0.0f;
            }
    }

    // Rows with a live pixel, one bit each.
    uint32_t live_rows() const {
        uint32_t live = 0;
        for (int row = 0; row < TILE; ++row) live |= uint32_t(bits(transmittance[row] > 0.0f) != 0) << row;
        return live;
    }

    template <bool INTERVAL> Floats alpha(const Splat& splat, Floats visibility, int row) const {
        Floats alpha = blend_alpha(splat.opacity, visibility);
        if constexpr (INTERVAL) {
            const float depth = splat.record[DEPTH];
            alpha = z_in[row] <= depth ? alpha : Floats{};
            alpha = depth < z_out[row] ? alpha : Floats{};
        }
        return alpha;
    }
};

// Calls step(index in the list, splat, rows reached and live) for the tile's records, near to far, until all pixels of
// the strip have stopped.
template <class Step>
inline void walk(const RasterInput& in, const std::vector<float>& thresholds, const Strip& strip,
                 const StripState& state, Step step) {
    constexpr int64_t CHECK_EVERY = 16;  // records between looks at which rows are still live
    const int64_t first = in.offsets[strip.tile], last = in.offsets[strip.tile + 1];
    uint32_t live = state.live_rows();
    for (int64_t i = first; i < last; ++i) {
        if ((i - first) % CHECK_EVERY == CHECK_EVERY - 1) live = state.live_rows();
        if (live == 0) return;
        const int32_t record = in.records[i];
        const Splat splat(in.table + int64_t(RECORD_WIDTH) * record, strip);
        const uint32_t rows = splat.reached_rows(thresholds[record]) & live;
        if (rows != 0) step(i, splat, rows);
    }
}

}  // namespace bytesplat
