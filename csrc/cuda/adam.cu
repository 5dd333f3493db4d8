// Adam on one tensor, in place.
#include "adam.h"

using namespace bytesplat;

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
adam(float* __restrict__ parameter,
     const float* __restrict__ gradient,
     const float* __restrict__ square,  // what the second moment averages, or null for the gradient's own
     float* __restrict__ exp_avg,
     float* __restrict__ exp_avg_sq,
     long long count,
     float first_rate, float second_rate, float step_size, float root_correction, float eps) {
    const AdamStep step = {first_rate, second_rate, step_size, root_correction, eps};
    const auto update = [&](float g, float s, float& p, float& m, float& v) {
        adam_average(step, s, v);
        adam_move(step, g, p, m, v);
    };
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (4 * i + 4 <= count) {
        float4 p = reinterpret_cast<float4*>(parameter)[i], m = reinterpret_cast<float4*>(exp_avg)[i];
        float4 v = reinterpret_cast<float4*>(exp_avg_sq)[i];
        const float4 g = reinterpret_cast<const float4*>(gradient)[i];
        float4 s = make_float4(g.x * g.x, g.y * g.y, g.z * g.z, g.w * g.w);
        if (square) s = reinterpret_cast<const float4*>(square)[i];
        update(g.x, s.x, p.x, m.x, v.x);
        update(g.y, s.y, p.y, m.y, v.y);
        update(g.z, s.z, p.z, m.z, v.z);
        update(g.w, s.w, p.w, m.w, v.w);
        reinterpret_cast<float4*>(parameter)[i] = p;
        reinterpret_cast<float4*>(exp_avg)[i] = m;
        reinterpret_cast<float4*>(exp_avg_sq)[i] = v;
    } else {
        for (long long k = 4 * i; k < count; ++k)
            update(gradient[k], square ? square[k] : gradient[k] * gradient[k], parameter[k], exp_avg[k], exp_avg_sq[k]);
    }
}
