// Stage adam: one dense optimizer step, in place.
#include <cstdint>

#include "../common/adam.h"

extern "C" void bytesplat_adam(int threads, const bytesplat::AdamStep* adam, int64_t count, const float* gradient,
                               float* parameter, float* exp_avg, float* exp_avg_sq) {
    constexpr int64_t WORTH_A_THREAD = 131072;  // elements; below, waking threads costs more than it saves
#pragma omp parallel for simd num_threads(threads) if (count > WORTH_A_THREAD)
    for (int64_t i = 0; i < count; ++i)
        bytesplat::adam_update(*adam, gradient[i], parameter[i], exp_avg[i], exp_avg_sq[i]);
}
