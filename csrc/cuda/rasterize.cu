// Rasterization: blends each tile's list front to back. One warp an 8 x 8 part of a tile; see raster.h.
//
// Compile-time: WARPS (of a block) and those of raster.h.
#include "raster.h"

using namespace bytesplat;

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
rasterize(const float* __restrict__ table,        // [M, RECORD_STRIDE]
          const int* __restrict__ records,        // [P] tile lists
          const long long* __restrict__ offsets,  // [tiles + 1]
          const int* __restrict__ sizes,          // [V, 2] width, height
          int width, int height,                  // of the stored images
          int tiles_x, int tiles_y, int tiles,
          const float* __restrict__ interval,  // [V, H, W, 2] depths, if INTERVAL
          float* __restrict__ rgb,             // [V, H, W, 3]
          float* __restrict__ depth,           // [V, H, W]
          float* __restrict__ transmittance,   // [V, H, W]
          const long long* state) {
    if (step_state(state).halted) return;
    __shared__ Stage stages[WARPS];
    const long long warp = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (warp / QUADRANTS >= tiles) return;
    const int lane = threadIdx.x % WARP, strip = lane / STRIP_LANES;
    Stage& stage = stages[threadIdx.x / WARP];
    const Region region = region_of_warp(warp, tiles_x, tiles_y);
    const long long end = offsets[region.tile + 1];
    const float centred_y = region.local_y + 4.0f * strip - 2.0f;  // relative to the centre of the 8 x 8 pixels

    float running[PIXELS], final[PIXELS], r[PIXELS], g[PIXELS], b[PIXELS], z[PIXELS];
    float2 bounds[PIXELS];
#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        const int y = region.y + 2 * q;
        const bool inside = region.x < sizes[2 * region.view] && y < sizes[2 * region.view + 1];
        running[q] = inside ? 1.0f : 0.0f;
        final[q] = 1.0f;
        r[q] = g[q] = b[q] = z[q] = 0.0f;
        bounds[q] = make_float2(0.0f, 0.0f);
        if (INTERVAL && inside)
            bounds[q] = reinterpret_cast<const float2*>(interval)[(static_cast<long long>(region.view) * height + y) * width + region.x];
    }
    stage_faint_record(stage);

    long long first = offsets[region.tile];
    Fetched fetched = fetch_record(table, records, first + lane, end);
    while (first < end) {
        const bool live = running[0] > TRANSMITTANCE_MIN || running[1] > TRANSMITTANCE_MIN;
        if (!__any_sync(ALL_LANES, live)) break;
        const int length = stage_records(stage, fetched, region, UNROLL);
        first += WARP;
        fetched = fetch_record(table, records, first + lane, end);  // on its way while these are blended
        for (int k = 0; k < length; k += UNROLL) {
            float alpha[UNROLL][PIXELS];
            float4 colour[UNROLL];
            float2 tail[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int index = stage.list[strip][k + u];
                colour[u] = stage.colour[index];
                tail[u] = stage.tail[index];
                const Column column = column_of(stage.shape[index], colour[u], region.local_x, centred_y);
#pragma unroll
                for (int q = 0; q < PIXELS; ++q) alpha[u][q] = fminf(exp2_fast(power_at(column, q)), ALPHA_MAX);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
                for (int q = 0; q < PIXELS; ++q) {
                    const float before = running[q], weight = alpha[u][q] * before;
                    const float behind = fmaf(-alpha[u][q], before, before);
                    if (!takes(alpha[u][q], tail[u].y, bounds[q])) continue;
                    running[q] = behind;
                    if (!blends(before, behind)) continue;
                    final[q] = behind;
                    r[q] = fmaf(weight, colour[u].z, r[q]);
                    g[q] = fmaf(weight, colour[u].w, g[q]);
                    b[q] = fmaf(weight, tail[u].x, b[q]);
                    z[q] = fmaf(weight, tail[u].y, z[q]);
                }
            }
        }
        __syncwarp();
    }

#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        const int y = region.y + 2 * q;
        if (region.x >= width || y >= height) continue;
        const long long pixel = (static_cast<long long>(region.view) * height + y) * width + region.x;
        rgb[3 * pixel] = r[q], rgb[3 * pixel + 1] = g[q], rgb[3 * pixel + 2] = b[q];
        depth[pixel] = z[q];
        transmittance[pixel] = final[q];
    }
}
