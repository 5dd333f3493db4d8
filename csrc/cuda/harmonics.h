// Spherical harmonics coefficients, fetched by a whole warp for those of its Gaussians that need them.
//
// A Gaussian's coefficients are up to 45 consecutive floats. A thread that read its own would touch 32 lines with each
// load; the warp together reads line after line, into shared memory, where each thread finds its own without conflicts.
#pragma once
#include "device.h"
#include "sh.h"

namespace bytesplat {

// Coefficients of the functions 1, 2, ... of one Gaussian, in shared memory; odd so that 32 threads hit 32 banks.
BS_HD constexpr int harmonics_stride(int degree) { return 3 * (sh_functions(degree) - 1) | 1; }

// The warp's threads with `wanted` get their coefficients in stage[rank * stride], rank being their place among those
// threads. All threads of the warp call it. features_rest: [N, STORED, 3]; `first` is the Gaussian of lane 0.
template <int DEGREE, int STORED>
__device__ inline void fetch_harmonics(const float* features_rest, long long first, bool wanted, float* stage) {
    constexpr int WORDS = 3 * (sh_functions(DEGREE) - 1), STRIDE = harmonics_stride(DEGREE);
    if constexpr (WORDS > 0) {
        const int lane = threadIdx.x % WARP;
        const unsigned mask = __ballot_sync(ALL_LANES, wanted);
        __shared__ unsigned char lanes[32][WARP];  // of each warp, those that want their coefficients
        unsigned char* wanting = lanes[threadIdx.x / WARP];
        if (wanted) wanting[__popc(mask & lanes_below())] = lane;
        __syncwarp();
        const float* source = features_rest + first * (3 * STORED);
        const int words = __popc(mask) * WORDS;
#pragma unroll 4
        for (int word = lane; word < words; word += WARP) {
            const int rank = word / WORDS, offset = word - rank * WORDS;
            copy_async(stage + rank * STRIDE + offset, source + wanting[rank] * (3 * STORED) + offset);
        }
        copy_async_wait();
        __syncwarp();
    }
}

}  // namespace bytesplat
