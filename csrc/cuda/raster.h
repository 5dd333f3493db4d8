// What the two directions of rasterization share: how a warp walks its part of a tile's list.
//
// A warp owns 8 x 8 pixels of a tile and works alone, without a barrier: it reads the tile's list 32 records at a time, one
// a lane, and each lane tests its record against the warp's pixels. The lower 16 lanes hold the upper 8 x 4 strip, the
// upper 16 lanes the lower one, two pixels each; each strip walks only those records that reach it, so that the halves of a
// warp may blend different records at the same moment. Fewer strips reach a record than tiles, by a factor of two to four.
//
// Blending is blend.h's, in the form that costs a GPU the fewest instructions:
// - power = -log2(e) sigma + log2(opacity), so alpha = 2^power needs no multiplication;
// - transmittance goes on falling behind the record that stops a pixel. It never rises, so "the pixel has not stopped" is
//   "transmittance is still above the limit", and no flag is kept;
// - every multiply-add is written as fmaf, so that both directions round alike and stop at the same record.
//
// Compile-time: STOP_ADD (0: drop, 1: add), INTERVAL (0, 1), UNROLL (records in flight).
#pragma once
#include "device.h"
#include "ellipse.h"
#include "step.h"

namespace bytesplat {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int STRIP_LANES = WARP / 2;
constexpr int PIXELS = 2;            // of a lane: (x, y) and (x, y + 2) of its strip
constexpr int QUADRANTS = 4;         // 8 x 8 parts of a tile, one warp each
constexpr int FAINT = WARP;          // index of a staged record that contributes nothing anywhere
constexpr int LIST = WARP + 8;       // a strip's list, padded with FAINT to a multiple of UNROLL or of 8

// Which pixels a warp and its lanes own.
struct Region {
    int view, tile;
    int x, y;               // first pixel of the lane; its second one is two rows below
    float centre_x;         // of the 8 x 8 pixels, image coordinates
    float strip_y;          // centre of the lane's 8 x 4 strip
    float local_x, local_y;  // the lane's first pixel relative to its strip's centre
};

__device__ inline Region region_of_warp(long long warp, int tiles_x, int tiles_y) {
    Region region;
    const int lane = threadIdx.x % WARP, strip = lane / STRIP_LANES, quadrant = warp % QUADRANTS;
    region.tile = static_cast<int>(warp / QUADRANTS);
    const int row = region.tile / tiles_x;
    region.view = row / tiles_y;
    const int x = (region.tile - row * tiles_x) * TILE + (quadrant & 1) * 8;
    const int y = (row - region.view * tiles_y) * TILE + (quadrant >> 1) * 8 + strip * 4;
    region.x = x + lane % 8;
    region.y = y + lane / 8 % 2;
    region.centre_x = x + 4.0f;
    region.strip_y = y + 2.0f;
    region.local_x = lane % 8 - 3.5f;
    region.local_y = lane / 8 % 2 - 1.5f;
    return region;
}

// Records that a warp holds in shared memory, in the terms that blending needs.
struct Stage {
    float4 shape[WARP + 1];   // mean x, y relative to the centre of the warp's 8 x 8 pixels; quadratic terms of power
    float4 colour[WARP + 1];  // the third quadratic term, log2(opacity), red, green
    float2 tail[WARP + 1];    // blue, depth
    unsigned char list[2][LIST];  // for each strip the staged records that reach it, near to far
};

__device__ inline void stage_faint_record(Stage& stage) {
    if (threadIdx.x % WARP) return;
    stage.shape[FAINT] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    stage.colour[FAINT] = make_float4(0.0f, -1e30f, 0.0f, 0.0f);
    stage.tail[FAINT] = make_float2(0.0f, 0.0f);
}

// A record on its way from memory.
struct Fetched {
    float4 a, b;
    float2 c;
    int index;  // its row, -1 if there is none
};

__device__ inline Fetched fetch_record(const float* table, const int* records, long long position, long long end) {
    Fetched fetched;
    fetched.index = position < end ? records[position] : -1;
    if (fetched.index >= 0) {
        const float4* row = reinterpret_cast<const float4*>(table) + static_cast<long long>(fetched.index) * (RECORD_STRIDE / 4);
        fetched.a = row[0], fetched.b = row[1], fetched.c = *reinterpret_cast<const float2*>(row + 2);
    }
    return fetched;
}

// Stages the 32 fetched records and lists those that reach each strip. Returns the longer list's length, rounded up to a
// multiple of `multiple`, a power of two. The whole warp calls it.
__device__ inline int stage_records(Stage& stage, const Fetched& fetched, const Region& region, int multiple) {
    const int lane = threadIdx.x % WARP, strip = lane / STRIP_LANES;
    const float upper_y = region.strip_y - 4.0f * strip;  // centre of the upper strip
    bool reaches[2] = {false, false};
    if (fetched.index >= 0) {
        const float a = fetched.a.z, b = fetched.a.w, c = fetched.b.x, opacity = fetched.b.y;
        const float x = fetched.a.x - region.centre_x, y = fetched.a.y - (upper_y + 2.0f);
        // A little slack: which pixels are reached is decided pixel by pixel.
        const float limit = fmaf(ellipse_threshold(opacity), 1.0001f, 1e-4f);
        reaches[0] = box_sigma(a, b, c, -3.5f - x, 3.5f - x, -3.5f - y, -0.5f - y) <= limit;
        reaches[1] = box_sigma(a, b, c, -3.5f - x, 3.5f - x, 0.5f - y, 3.5f - y) <= limit;
        stage.shape[lane] = make_float4(x, y, -0.5f * LOG2_E * a, -LOG2_E * b);
        stage.colour[lane] = make_float4(-0.5f * LOG2_E * c, __log2f(opacity), fetched.b.z, fetched.b.w);
        stage.tail[lane] = fetched.c;
    }
    int length[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        const unsigned hits = __ballot_sync(ALL_LANES, reaches[s]);
        if (reaches[s]) stage.list[s][__popc(hits & lanes_below())] = lane;
        length[s] = __popc(hits);
    }
    const int longer = (max(length[0], length[1]) + multiple - 1) & -multiple;
    for (int i = length[strip] + lane % STRIP_LANES; i < longer; i += STRIP_LANES) stage.list[strip][i] = FAINT;
    __syncwarp();
    return longer;
}

// A record at a lane's column of pixels.
struct Column {
    float dx, dy;         // from the lane's first pixel to the mean
    float across, slope;  // power = across + dy (slope + quadratic dy)
    float quadratic;
};

__device__ inline Column column_of(const float4& shape, const float4& colour, float local_x, float centred_y) {
    const float dx = shape.x - local_x;
    return {dx, shape.y - centred_y, fmaf(shape.z * dx, dx, colour.y), shape.w * dx, colour.x};
}

// log2 of the opacity at the lane's q-th pixel, before clamping.
__device__ inline float power_at(const Column& column, int q) {
    const float dy = column.dy - 2.0f * q;
    return fmaf(dy, fmaf(column.quadratic, dy, column.slope), column.across);
}

// Whether a pixel takes the record at all: it is not too faint there, nor outside the pixel's depth interval.
__device__ inline bool takes(float alpha, float depth, float2 interval) {
    return alpha >= ALPHA_MIN && (!INTERVAL || (interval.x <= depth && depth < interval.y));
}

// Whether the record is blended, given the transmittance ahead of it and behind it.
__device__ inline bool blends(float before, float behind) {
    return (STOP_ADD ? before : behind) > TRANSMITTANCE_MIN;
}

}  // namespace bytesplat
