// Stage adam: one dense optimizer step, in place.
#include <algorithm>
#include <cstdint>

#include "../common/adam.h"
#include "entry.h"
#include "parallel.h"

// `square`: what the second moment averages, or null for the gradient's own.
extern "C" int64_t bytesplat_adam(int threads, const bytesplat::AdamStep* adam, int64_t count, const float* gradient,
                                  const float* square, float* parameter, float* exp_avg, float* exp_avg_sq) try {
    constexpr int64_t CHUNK = 32768;  // elements
    bytesplat::parallel_for(threads, (count + CHUNK - 1) / CHUNK, 1, [=](int64_t chunk) {
        const int64_t last = std::min(chunk * CHUNK + CHUNK, count);
        if (square) {
#pragma omp simd
            for (int64_t i = chunk * CHUNK; i < last; ++i) {
                bytesplat::adam_average(*adam, square[i], exp_avg_sq[i]);
                bytesplat::adam_move(*adam, gradient[i], parameter[i], exp_avg[i], exp_avg_sq[i]);
            }
            return;
        }
#pragma omp simd
        for (int64_t i = chunk * CHUNK; i < last; ++i)
            bytesplat::adam_update(*adam, gradient[i], parameter[i], exp_avg[i], exp_avg_sq[i]);
    });
    return 0;
} catch (...) {
    return bytesplat::failure();
}
