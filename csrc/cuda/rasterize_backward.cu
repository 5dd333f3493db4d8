// Derivative of rasterization: every warp adds what its square says to the records' gradient rows; see backward.h.
//
// Compile-time: BLOCKS (that a multiprocessor should have registers for) and those of backward.h.
#define DEPTHS (INTERVAL || DEPTH_GRADIENT)
#define COMPACT 0
#include "backward.h"

using namespace bytesplat;

extern "C" __global__ void __launch_bounds__(WARP, BLOCKS)
rasterize_backward(const float* __restrict__ table,        // [M, RECORD_STRIDE]
                   const int* __restrict__ records,        // [P] tile lists
                   const long long* __restrict__ offsets,  // [tiles + 1]
                   const int* __restrict__ sizes,          // [V, 2] width, height
                   int width, int height,                  // of the stored images
                   int tiles_x, int tiles_y,
                   const float* __restrict__ interval,         // [V, H, W, 2] depths, if INTERVAL
                   const float* __restrict__ rgb,              // [V, H, W, 3] as rasterized
                   const float* __restrict__ depth,            // [V, H, W]
                   const float* __restrict__ transmittance,    // [V, H, W]
                   const float* __restrict__ d_rgb,            // [V, H, W, 3] dL/d(rgb)
                   const float* __restrict__ d_depth,          // [V, H, W], if DEPTH_GRADIENT
                   const float* __restrict__ d_transmittance,  // [V, H, W] or null
                   float* __restrict__ gradient_rows,          // [M, ROW] zero
                   const long long* state) {
    if (step_state(state).halted) return;
    __shared__ Queue<WARP + 2 * GROUP> queue;  // those that wait, those that come, those that fill the last group
    __shared__ Reduction shared;
    const Region region = region_of_block(tiles_x, tiles_y);
    const unsigned next = static_cast<unsigned>(offsets[region.tile]);
    const unsigned end = static_cast<unsigned>(offsets[region.tile + 1]);
    if (next == end) return;

    PixelGradients pixels = {};
#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        const int y = region.y + ROW_STEP * q;
        if (region.x >= sizes[2 * region.view] || y >= sizes[2 * region.view + 1]) continue;
        const long long pixel = (static_cast<long long>(region.view) * height + y) * width + region.x;
        pixels.set(q, rgb[3 * pixel], rgb[3 * pixel + 1], rgb[3 * pixel + 2], transmittance[pixel], d_rgb[3 * pixel],
                   d_rgb[3 * pixel + 1], d_rgb[3 * pixel + 2], d_transmittance ? d_transmittance[pixel] : 0.0f);
        if (DEPTH_GRADIENT) {
            pixels.gz[q] = d_depth[pixel];
            pixels.rest[q] = fmaf(depth[pixel], pixels.gz[q], pixels.rest[q]);
        }
        if (INTERVAL) pixels.bounds[q] = reinterpret_cast<const float2*>(interval)[pixel];
    }
    add_to_rows(shared, queue, 0, region, pixels, table, records, next, end, gradient_rows);
}
