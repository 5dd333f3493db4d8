// What the two directions of rasterization share: how a warp walks its part of a tile's list.
//
// A block is one warp and owns 8 x 8 pixels, a quarter of a tile; lane l has pixels (l % 8, l / 8) and four rows
// below. It reads the tile's list 32 records at a time, one a lane; each lane tests its record against the 8 x 8
// pixels, and those that reach them line up in a queue in shared memory, near to far. Then all lanes blend the queue,
// record after record. Less than half of a tile's list reaches such a part, and no warp ever waits for another one.
//
// Blending is blend.h's, in the form that costs a GPU the fewest instructions:
// - power = log2(opacity) - log2(e) sigma, so alpha = 2^power needs no multiplication;
// - transmittance goes on falling behind the record that stops a pixel. It never rises, so "the pixel has not
//   stopped" is "transmittance is still above the limit", and no flag is kept;
// - every multiply-add is written as fmaf, so that both directions round alike and stop at the same record.
//
// Compile-time: STOP_ADD (0: drop, 1: add), INTERVAL (0, 1), UNROLL (records in flight); each kernel defines DEPTHS
// (whether it needs those of the records).
#pragma once
#include "device.h"
#include "step.h"

namespace bytesplat {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int PART = 8;       // side of a warp's square, pixels
constexpr int QUARTERS = 4;   // of a tile
constexpr int PIXELS = 2;     // of a lane
constexpr int ROW_STEP = 4;   // rows between them
constexpr float FAINTEST = -7.9943534369f;  // log2(ALPHA_MIN)

// Which pixels a lane owns.
struct Region {
    int view, tile;
    int x, y;                // its first pixel
    float centre_x, centre_y;  // of the warp's square, image coordinates
    float local_x, local_y;  // the first pixel relative to that
};

__device__ inline int lane_index() { return threadIdx.x % WARP; }

__device__ inline Region region_of(int view, int column, int row, int quarter, int lane, int tiles_x, int tiles_y) {
    Region region;
    region.view = view;
    region.tile = (view * tiles_y + row) * tiles_x + column;
    const int x = column * TILE + quarter % 2 * PART, y = row * TILE + quarter / 2 * PART;
    region.x = x + lane % PART;
    region.y = y + lane / PART;
    region.centre_x = x + 0.5f * PART;
    region.centre_y = y + 0.5f * PART;
    region.local_x = lane % PART - 3.5f;
    region.local_y = lane / PART - 3.5f;
    return region;
}

// The region of a block that is one warp.
__device__ inline Region region_of_block(int tiles_x, int tiles_y) {
    const int tile = blockIdx.x / QUARTERS, row = tile / tiles_x, view = row / tiles_y;
    return region_of(view, tile - row * tiles_x, row - view * tiles_y, blockIdx.x % QUARTERS, lane_index(), tiles_x,
                     tiles_y);
}

// A record in the terms that blending needs.
#if DEPTHS
using Tail = float4;  // blue, bits of the record's index, depth
__device__ inline Tail make_tail(float blue, int index, float depth) {
    return make_float4(blue, __uint_as_float(index), depth, 0.0f);
}
__device__ inline float depth_of(const Tail& tail) { return tail.z; }
#else
using Tail = float2;
__device__ inline Tail make_tail(float blue, int index, float) { return make_float2(blue, __uint_as_float(index)); }
__device__ inline float depth_of(const Tail&) { return 0.0f; }
#endif
struct Queued {
    float4 shape;   // mean relative to the centre of the square; power's terms in dx^2 and dx dy
    float4 colour;  // power's term in dy^2, log2(opacity), red, green
    Tail tail;
};

__device__ inline Queued faint_record() {  // contributes nothing anywhere
    const float4 nothing = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return {nothing, make_float4(0.0f, -1e30f, 0.0f, 0.0f), make_tail(0.0f, 0, 0.0f)};
}

// A warp's queue, in shared memory: 40 bytes a record, 48 with depths; lanes that write neighbours hit different banks.
template <int LENGTH> struct __align__(16) Queue {
    float4 shape[LENGTH], colour[LENGTH];
    Tail tail[LENGTH];

    __device__ Queued operator[](int k) const { return {shape[k], colour[k], tail[k]}; }
    __device__ void put(int k, const Queued& record) {
        shape[k] = record.shape, colour[k] = record.colour, tail[k] = record.tail;
    }
};

// A record on its way from memory.
struct Fetched {
    float4 a, b;
    float2 c;
    int index;  // its row, -1 if there is none
};

// The lane's record of the 32 of a tile's list that start at `next`; -1 behind the list's end.
__device__ inline int fetch_index(const int* records, unsigned next, unsigned end) {
    const unsigned at = next + lane_index();
    return at < end ? records[at] : -1;
}

__device__ inline Fetched fetch_record(const float* table, int index) {
    Fetched fetched = {};
    fetched.index = index;
    if (index >= 0) {
        const float4* row = reinterpret_cast<const float4*>(table + static_cast<long long>(index) * RECORD_STRIDE);
        fetched.a = row[0], fetched.b = row[1], fetched.c = *reinterpret_cast<const float2*>(row + 2);
    }
    return fetched;
}

// Largest power over the square that spans the pixel centres; that of ellipse.h's box_sigma, which says why two
// candidates are enough. Missing records (all zero) give NaN.
__device__ inline float strongest(const Queued& record) {
    const float x = record.shape.x, y = record.shape.y, xx = record.shape.z, xy = record.shape.w, yy = record.colour.x;
    const float x0 = -3.5f - x, x1 = 3.5f - x, y0 = -3.5f - y, y1 = 3.5f - y;  // from the mean
    const float edge_x = limit(0.0f, x0, x1), edge_y = limit(0.0f, y0, y1);
    const float best_y = limit(-0.5f * xy * edge_x * reciprocal_fast(yy), y0, y1);
    const float best_x = limit(-0.5f * xy * edge_y * reciprocal_fast(xx), x0, x1);
    const float on_vertical = fmaf(edge_x, fmaf(xx, edge_x, xy * best_y), yy * best_y * best_y);
    const float on_horizontal = fmaf(best_x, fmaf(xx, best_x, xy * edge_y), yy * edge_y * edge_y);
    return fmaxf(on_vertical, on_horizontal) + record.colour.y;
}

// 32 fetched records, one a lane, and which of them reach the square.
struct Selected {
    Queued record;
    bool reaches;
    unsigned hits;  // the lanes whose records do
};

// The whole warp calls it.
__device__ inline Selected select(const Fetched& fetched, float centre_x, float centre_y) {
    Selected selected;
    Queued& record = selected.record;
    record.shape = make_float4(fetched.a.x - centre_x, fetched.a.y - centre_y, -0.5f * LOG2_E * fetched.a.z,
                               -LOG2_E * fetched.a.w);
    record.colour = make_float4(-0.5f * LOG2_E * fetched.b.x, log2_fast(fetched.b.y), fetched.b.z, fetched.b.w);
    record.tail = make_tail(fetched.c.x, fetched.index, fetched.c.y);
    // A little slack: which pixels are reached is decided pixel by pixel.
    selected.reaches = fetched.index >= 0 && strongest(record) >= FAINTEST - 1e-3f;
    selected.hits = __ballot_sync(ALL_LANES, selected.reaches);
    return selected;
}

// Appends those that reach the square to a queue of `length`; returns its new length.
template <int LENGTH>
__device__ inline int append(Queue<LENGTH>& queue, int length, const Selected& selected) {
    if (selected.reaches) queue.put(length + __popc(selected.hits & lanes_below()), selected.record);
    return length + __popc(selected.hits);
}

// A record at a lane's column of pixels.
struct Column {
    float dx, dy;         // from the lane's first pixel to the mean
    float across, slope;  // power = across + dy (slope + quadratic dy)
    float quadratic;
};

__device__ inline Column column_of(const Queued& record, const Region& region) {
    const float dx = record.shape.x - region.local_x;
    return {dx, record.shape.y - region.local_y, fmaf(record.shape.z * dx, dx, record.colour.y), record.shape.w * dx,
            record.colour.x};
}

// log2 of the opacity at the lane's q-th pixel, before clamping.
__device__ inline float power_at(const Column& column, int q) {
    const float dy = column.dy - static_cast<float>(ROW_STEP * q);
    return fmaf(dy, fmaf(column.quadratic, dy, column.slope), column.across);
}

// Whether a pixel takes the record at all: it is not too faint there, nor outside the pixel's depth interval.
__device__ inline bool takes(float alpha, float depth, float2 interval) {
    return alpha >= ALPHA_MIN && (!INTERVAL || (interval.x <= depth && depth < interval.y));
}

// Whether the record is blended, given the transmittance ahead of it and behind it, in units of 1 / unit.
__device__ inline bool blends(float before, float behind, float unit = 1.0f) {
    return (STOP_ADD ? before : behind) > unit * TRANSMITTANCE_MIN;
}

// A lane's pixels while they are blended front to back.
struct Blended {
    float running[PIXELS];  // transmittance, as if no pixel ever stopped; zero outside the view
    float final[PIXELS];    // transmittance behind the last record that was blended
    float r[PIXELS], g[PIXELS], b[PIXELS], z[PIXELS];
    float2 bounds[PIXELS];  // of depth

    __device__ explicit Blended(const Region& region, int width, int height) {  // of the view
#pragma unroll
        for (int q = 0; q < PIXELS; ++q) {
            running[q] = region.x < width && region.y + ROW_STEP * q < height ? 1.0f : 0.0f;
            final[q] = 1.0f;
            r[q] = g[q] = b[q] = z[q] = 0.0f;
            bounds[q] = make_float2(0.0f, 0.0f);
        }
    }
    // Whether any pixel of the warp goes on.
    __device__ bool live() const {
        return __any_sync(ALL_LANES, running[0] > TRANSMITTANCE_MIN || running[1] > TRANSMITTANCE_MIN);
    }
    // The next UNROLL records of a queue.
    template <int LENGTH> __device__ void blend(const Queue<LENGTH>& queue, int first, const Region& region) {
        float alpha[UNROLL][PIXELS];
        float4 colour[UNROLL];
        Tail tail[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Queued record = queue[first + u];
            const Column column = column_of(record, region);
            colour[u] = record.colour, tail[u] = record.tail;
#pragma unroll
            for (int q = 0; q < PIXELS; ++q) alpha[u][q] = fminf(exp2_fast(power_at(column, q)), ALPHA_MAX);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int q = 0; q < PIXELS; ++q) {
                const float before = running[q];
                const float a = takes(alpha[u][q], depth_of(tail[u]), bounds[q]) ? alpha[u][q] : 0.0f;
                running[q] = fmaf(-a, before, before);
                const bool blended = blends(before, running[q]);
                final[q] = blended ? running[q] : final[q];
                const float weight = blended ? a * before : 0.0f;
                r[q] = fmaf(weight, colour[u].z, r[q]);
                g[q] = fmaf(weight, colour[u].w, g[q]);
                b[q] = fmaf(weight, tail[u].x, b[q]);
                if (DEPTHS) z[q] = fmaf(weight, depth_of(tail[u]), z[q]);
            }
    }
};

}  // namespace bytesplat
