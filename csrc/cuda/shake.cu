// Noise on the means of faint Gaussians, along their own axes: what keeps the Gaussians of 3DGS-MCMC in motion
// (ops.reference.shake). Random numbers belong to ids: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"), and normal ones of them by Box and Muller.
#include "device.h"
#include "platform.h"

using namespace bytesplat;

constexpr int THREADS = 256;
constexpr float GATE_STEEPNESS = 100.0f;         // mirrors ops/reference/shake.py
constexpr float GATE_MIN = 1.0f / (1u << 24);
constexpr float UNIT = 1.0f / 4294967296.0f;  // of a word

__device__ inline void philox(unsigned words[4], unsigned key_0, unsigned key_1) {
    for (int round = 0; round < 10; ++round) {
        const uint64 p0 = uint64(words[0]) * 0xD2511F53u, p1 = uint64(words[2]) * 0xCD9E8D57u;
        words[0] = static_cast<unsigned>(p1 >> 32) ^ words[1] ^ key_0, words[1] = static_cast<unsigned>(p1);
        words[2] = static_cast<unsigned>(p0 >> 32) ^ words[3] ^ key_1, words[3] = static_cast<unsigned>(p0);
        key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
    }
}

// Two independent normal numbers. Of a uniform number close to one the logarithm is that of what it lacks.
__device__ inline float2 normal(unsigned radius_word, unsigned angle_word) {
    const float lacks = ~radius_word * UNIT;
    const float logarithm = radius_word >> 31 ? log1pf(-lacks) : logf((radius_word + 1u) * UNIT);
    const float radius = sqrt(-2.0f * logarithm), angle = angle_word * (6.2831853071795865f * UNIT);
    return make_float2(radius * cosf(angle), radius * sinf(angle));
}

// `vector` turned by the unit quaternion (w, axis).
__device__ inline void turn(float w, const float axis[3], float vector[3]) {
    float turned[3], twice[3];
    for (int i = 0; i < 3; ++i)
        turned[i] = 2.0f * (axis[(i + 1) % 3] * vector[(i + 2) % 3] - axis[(i + 2) % 3] * vector[(i + 1) % 3]);
    for (int i = 0; i < 3; ++i)
        twice[i] = axis[(i + 1) % 3] * turned[(i + 2) % 3] - axis[(i + 2) % 3] * turned[(i + 1) % 3];
    for (int i = 0; i < 3; ++i) vector[i] += w * turned[i] + twice[i];
}

// One thread a Gaussian.
extern "C" __global__ void __launch_bounds__(THREADS)
shake(float* __restrict__ means,            // [N, 3] world
      const float* __restrict__ quats,      // [N, 4] w, x, y, z
      const float* __restrict__ scales,     // [N, 3] log
      const float* __restrict__ opacities,  // [N, 1] logit
      const long long* __restrict__ ids,    // [N]
      int gaussians,                        // N
      float strength, float min_opacity,
      unsigned seed, unsigned step) {
    const int i = static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
    if (i >= gaussians) return;
    const float opacity = 1.0f / (1.0f + expf(-opacities[i]));
    const float gate = 1.0f / (1.0f + expf(GATE_STEEPNESS * (opacity - min_opacity)));
    if (!(gate > GATE_MIN)) return;

    const uint64 id = ids[i];
    unsigned words[4] = {static_cast<unsigned>(id), static_cast<unsigned>(id >> 32), 0u, 0u};
    philox(words, seed, step);
    const float2 first = normal(words[0], words[1]), second = normal(words[2], words[3]);
    float noise[3] = {first.x, first.y, second.x};

    const float4 quat = reinterpret_cast<const float4*>(quats)[i];
    const float square = quat.x * quat.x + quat.y * quat.y + quat.z * quat.z + quat.w * quat.w;
    const float inverse = 1.0f / sqrt(larger(square, 1e-24f));
    const float w = quat.x * inverse, axis[3] = {quat.y * inverse, quat.z * inverse, quat.w * inverse};
    const float back[3] = {-axis[0], -axis[1], -axis[2]};
    turn(w, back, noise);
    for (int k = 0; k < 3; ++k) noise[k] *= expf(2.0f * scales[3ll * i + k]);  // the covariance is R diag(variance) R^T
    turn(w, axis, noise);
    for (int k = 0; k < 3; ++k) means[3ll * i + k] += strength * gate * noise[k];
}
