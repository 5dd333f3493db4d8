// Rasterization: blends each tile's list front to back; see raster.h.
//
// Compile-time: those of raster.h.
#include "raster.h"

using namespace bytesplat;

constexpr int BLOCKS_OF_MULTIPROCESSOR = 32;  // the most that any GPU holds: registers must not be the limit

extern "C" __global__ void __launch_bounds__(WARP, BLOCKS_OF_MULTIPROCESSOR)
rasterize(const float* __restrict__ table,        // [M, RECORD_STRIDE]
          const int* __restrict__ records,        // [P] tile lists
          const long long* __restrict__ offsets,  // [tiles + 1]
          const int* __restrict__ sizes,          // [V, 2] width, height
          int width, int height,                  // of the stored images
          int tiles_x, int tiles_y,
          const float* __restrict__ interval,  // [V, H, W, 2] depths, if INTERVAL
          float* __restrict__ rgb,             // [V, H, W, 3]
          float* __restrict__ depth,           // [V, H, W]
          float* __restrict__ transmittance,   // [V, H, W]
          const long long* state) {
    if (step_state(state).halted) return;
    __shared__ Queued queue[WARP + UNROLL];
    const Region region = region_of_block(tiles_x, tiles_y);

    float running[PIXELS], final[PIXELS], r[PIXELS] = {}, g[PIXELS] = {}, b[PIXELS] = {}, z[PIXELS] = {};
    float2 bounds[PIXELS] = {};
#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        const int y = region.y + ROW_STEP * q;
        const bool inside = region.x < sizes[2 * region.view] && y < sizes[2 * region.view + 1];
        running[q] = inside ? 1.0f : 0.0f;
        final[q] = 1.0f;
        const long long pixel = (static_cast<long long>(region.view) * height + y) * width + region.x;
        if (INTERVAL && inside) bounds[q] = reinterpret_cast<const float2*>(interval)[pixel];
    }

    unsigned next = static_cast<unsigned>(offsets[region.tile]);
    const unsigned end = static_cast<unsigned>(offsets[region.tile + 1]);
    Fetched fetched = fetch_record(table, fetch_index(records, next, end));
    while (next < end) {
        const bool live = running[0] > TRANSMITTANCE_MIN || running[1] > TRANSMITTANCE_MIN;
        if (!__any_sync(ALL_LANES, live)) break;
        const int length = enqueue(queue, 0, fetched, region.centre_x, region.centre_y);
        if (threadIdx.x < UNROLL) queue[length + threadIdx.x] = faint_record();  // to fill the last group
        next += WARP;
        fetched = fetch_record(table, fetch_index(records, next, end));  // on their way while these are blended
        __syncwarp();
        for (int k = 0; k < length; k += UNROLL) {
            float alpha[UNROLL][PIXELS];
            float4 colour[UNROLL], tail[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const Queued& record = queue[k + u];
                const Column column = column_of(record, region);
                colour[u] = record.colour, tail[u] = record.tail;
#pragma unroll
                for (int q = 0; q < PIXELS; ++q) alpha[u][q] = fminf(exp2_fast(power_at(column, q)), ALPHA_MAX);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
#pragma unroll
                for (int q = 0; q < PIXELS; ++q) {
                    const float before = running[q], a = takes(alpha[u][q], tail[u].y, bounds[q]) ? alpha[u][q] : 0.0f;
                    running[q] = fmaf(-a, before, before);
                    const bool blended = blends(before, running[q]);
                    final[q] = blended ? running[q] : final[q];
                    const float weight = blended ? a * before : 0.0f;
                    r[q] = fmaf(weight, colour[u].z, r[q]);
                    g[q] = fmaf(weight, colour[u].w, g[q]);
                    b[q] = fmaf(weight, tail[u].x, b[q]);
                    z[q] = fmaf(weight, tail[u].y, z[q]);
                }
        }
        __syncwarp();
    }

#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        const int y = region.y + ROW_STEP * q;
        if (region.x >= width || y >= height) continue;
        const long long pixel = (static_cast<long long>(region.view) * height + y) * width + region.x;
        rgb[3 * pixel] = r[q], rgb[3 * pixel + 1] = g[q], rgb[3 * pixel + 2] = b[q];
        depth[pixel] = z[q];
        transmittance[pixel] = final[q];
    }
}
