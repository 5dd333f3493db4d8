// How far down each tile's list something is still seen: walks it as rasterize.cu does, and keeps nothing else.
//
// Compile-time: those of raster.h, INTERVAL being 0 and UNROLL 1.
#define DEPTHS 0
#include "raster.h"

using namespace bytesplat;

extern "C" __global__ void __launch_bounds__(WARP)
effective_lengths(const float* __restrict__ table,        // [M, RECORD_STRIDE]
                  const int* __restrict__ records,        // [P] tile lists
                  const long long* __restrict__ offsets,  // [tiles + 1]
                  const int* __restrict__ sizes,          // [V, 2] width, height
                  int tiles_x, int tiles_y,
                  int* __restrict__ lengths) {  // [tiles], zero
    __shared__ Queue<WARP> queue;
    const Region region = region_of_block(tiles_x, tiles_y);
    Blended pixels(region, sizes[2 * region.view], sizes[2 * region.view + 1]);

    const unsigned begin = static_cast<unsigned>(offsets[region.tile]);
    const unsigned end = static_cast<unsigned>(offsets[region.tile + 1]);
    int length = 0;
    for (unsigned next = begin; next < end && pixels.live(); next += WARP) {
        const Selected selected =
            select(fetch_record(table, fetch_index(records, next, end)), region.centre_x, region.centre_y);
        const int queued = append(queue, 0, selected);
        __syncwarp();
        int last = -1;  // of the queue, that one of the lane's pixels takes
        for (int k = 0; k < queued; ++k) {
            const float before[PIXELS] = {pixels.final[0], pixels.final[1]};
            pixels.blend(queue, k, region);
            if (pixels.final[0] != before[0] || pixels.final[1] != before[1]) last = k;
        }
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) last = max(last, __shfl_xor_sync(ALL_LANES, last, step));
        // The lane that put it there has the record of that place in the list.
        const bool mine = selected.reaches && __popc(selected.hits & lanes_below()) == last;
        const unsigned owner = __ballot_sync(ALL_LANES, mine);
        if (owner != 0) length = static_cast<int>(next - begin) + __ffs(owner);
        __syncwarp();
    }
    if (threadIdx.x == 0 && length > 0) atomicMax(lengths + region.tile, length);
}
