// Adam on one tensor, in place.
#include "adam.h"

using namespace bytesplat;

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
adam(float* __restrict__ parameter,
     const float* __restrict__ gradient,
     float* __restrict__ exp_avg,
     float* __restrict__ exp_avg_sq,
     long long count,
     float first_rate, float second_rate, float step_size, float root_correction, float eps) {
    const AdamStep step = {first_rate, second_rate, step_size, root_correction, eps};
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (4 * i + 4 <= count) {
        float4 p = reinterpret_cast<float4*>(parameter)[i], m = reinterpret_cast<float4*>(exp_avg)[i];
        float4 v = reinterpret_cast<float4*>(exp_avg_sq)[i];
        const float4 g = reinterpret_cast<const float4*>(gradient)[i];
        adam_update(step, g.x, p.x, m.x, v.x);
        adam_update(step, g.y, p.y, m.y, v.y);
        adam_update(step, g.z, p.z, m.z, v.z);
        adam_update(step, g.w, p.w, m.w, v.w);
        reinterpret_cast<float4*>(parameter)[i] = p;
        reinterpret_cast<float4*>(exp_avg)[i] = m;
        reinterpret_cast<float4*>(exp_avg_sq)[i] = v;
    } else {
        for (long long k = 4 * i; k < count; ++k)
            adam_update(step, gradient[k], parameter[k], exp_avg[k], exp_avg_sq[k]);
    }
}
