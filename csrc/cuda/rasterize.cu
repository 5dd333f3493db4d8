// Rasterization: blends each tile's list front to back; see raster.h.
//
// Compile-time: those of raster.h.
#define DEPTHS 1
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
    __shared__ Queue<WARP + UNROLL> queue;
    const Region region = region_of_block(tiles_x, tiles_y);
    const int view_width = sizes[2 * region.view], view_height = sizes[2 * region.view + 1];
    Blended pixels(region, view_width, view_height);
#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        const int y = region.y + ROW_STEP * q;
        const long long pixel = (static_cast<long long>(region.view) * height + y) * width + region.x;
        if (INTERVAL && region.x < view_width && y < view_height)
            pixels.bounds[q] = reinterpret_cast<const float2*>(interval)[pixel];
    }

    unsigned next = static_cast<unsigned>(offsets[region.tile]);
    const unsigned end = static_cast<unsigned>(offsets[region.tile + 1]);
    Fetched fetched = fetch_record(table, fetch_index(records, next, end));
    while (next < end && pixels.live()) {
        const int length = append(queue, 0, select(fetched, region.centre_x, region.centre_y));
        if (threadIdx.x < UNROLL) queue.put(length + threadIdx.x, faint_record());  // to fill the last group
        next += WARP;
        fetched = fetch_record(table, fetch_index(records, next, end));  // on their way while these are blended
        __syncwarp();
        for (int k = 0; k < length; k += UNROLL) pixels.blend(queue, k, region);
        __syncwarp();
    }

#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        const int y = region.y + ROW_STEP * q;
        if (region.x >= width || y >= height) continue;
        const long long pixel = (static_cast<long long>(region.view) * height + y) * width + region.x;
        rgb[3 * pixel] = pixels.r[q], rgb[3 * pixel + 1] = pixels.g[q], rgb[3 * pixel + 2] = pixels.b[q];
        depth[pixel] = pixels.z[q];
        transmittance[pixel] = pixels.final[q];
    }
}
