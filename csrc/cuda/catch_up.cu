// Deferred Adam: the colours of Gaussians that no view shows stay behind, and are caught up with before one shows them.
//
// What a Gaussian looks like from where depends on its geometry, which is moved in every step. Its colours, four fifths
// of all bytes, influence nothing meanwhile: the steps that they have missed are on record, and one pass over them in
// registers does what as many passes over memory would have done.
//
// Compile-time: SH_STORED (rows of features_rest), and as 0 or 1 ANTIALIASED, EVERYONE (all Gaussians, whatever the views).
#include "adam.h"
#include "device.h"
#include "projection.h"
#include "step.h"

using namespace bytesplat;

constexpr int THREADS = 128;
constexpr int REST = 3 * SH_STORED;
constexpr int FEATURES = 3 + REST;  // floats of a Gaussian's colours
constexpr int DC_NAME = 4, REST_NAME = 5;  // among the step sizes of AdamTable

// Whether the projection kernel may find the Gaussian visible: its own test with some slack, because the compiler may
// round the same formulas in another way here. One too many costs a little time, one too few would be drawn as it was.
__device__ inline bool may_be_visible(const Shape<float>& shape, const Camera<float>& camera, float near_plane,
                                      float far_plane, float dilation) {
    constexpr float SLACK = 1.001f;
    float seen[3];
    camera_mean(camera, shape.mean, seen);
    if (!(seen[2] * SLACK > near_plane && seen[2] < far_plane * SLACK)) return false;
    const Projection<float> p = project_shape(shape, camera, dilation, ANTIALIASED);
    if (!(p.opacity * SLACK >= ALPHA_MIN)) return false;
    const float reach = 2.0f * ellipse_threshold(p.opacity * SLACK) * SLACK;
    const float extent_x = sqrt(reach * p.xx) * SLACK + 1.0f, extent_y = sqrt(reach * p.yy) * SLACK + 1.0f;
    const float x = p.mean2d[0], y = p.mean2d[1], far_x = 1e-5f * larger(x, -x), far_y = 1e-5f * larger(y, -y);
    return x + extent_x + far_x >= 0.0f && x - extent_x - far_x <= camera.width && y + extent_y + far_y >= 0.0f &&
           y - extent_y - far_y <= camera.height;
}

// One thread a Gaussian, then all threads of a block over the colours of those that are due.
extern "C" __global__ void __launch_bounds__(THREADS)
catch_up(const float* __restrict__ means,      // [N, 3] world
         const float* __restrict__ quats,      // [N, 4] w, x, y, z
         const float* __restrict__ scales,     // [N, 3] log
         const float* __restrict__ opacities,  // [N, 1] logit
         float* features_dc, float* features_dc_1, float* features_dc_2,        // [N, 3], with moments
         float* features_rest, float* features_rest_1, float* features_rest_2,  // [N, SH_STORED, 3], with moments
         int gaussians,                        // N
         int* __restrict__ caught_up,          // [N] steps on record that the colours have had
         const float* __restrict__ record,     // [steps] AdamTable
         const float* __restrict__ fastest,    // [6] largest step_size / root_correction by parameter
         const int* __restrict__ recorded,     // [1]
         const float* __restrict__ viewmats,    // [V, 4, 4] world to camera
         const float* __restrict__ intrinsics,  // [V, 4] fx, fy, cx, cy
         const int* __restrict__ sizes,         // [V, 2] width, height
         int views, float near_plane, float far_plane, float dilation) {
    __shared__ int due[THREADS], behind_from[THREADS];
    __shared__ int count;
    const int to = *recorded;
    const int gaussian = blockIdx.x * THREADS + threadIdx.x;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();

    // Phase 1: who is behind, and may be looked at.
    const int from = gaussian < gaussians ? caught_up[gaussian] : to;
    bool wanted = from < to;
    if (wanted && !EVERYONE) {
        Shape<float> shape;
        const float4 quat = reinterpret_cast<const float4*>(quats)[gaussian];
        shape.quat[0] = quat.x, shape.quat[1] = quat.y, shape.quat[2] = quat.z, shape.quat[3] = quat.w;
        for (int i = 0; i < 3; ++i) shape.mean[i] = means[3ll * gaussian + i];
        for (int i = 0; i < 3; ++i) shape.scale[i] = scales[3ll * gaussian + i];
        shape.opacity = opacities[gaussian];
        wanted = false;
        for (int view = 0; view < views && !wanted; ++view) {
            const Camera<float> camera = load_camera(viewmats + 16 * view, intrinsics + 4 * view, sizes + 2 * view);
            wanted = may_be_visible(shape, camera, near_plane, far_plane, dilation);
        }
    }
    if (wanted) {
        const int place = atomicAdd(&count, 1);
        due[place] = threadIdx.x, behind_from[place] = from;
        caught_up[gaussian] = to;
    }
    __syncthreads();

    // Phase 2: their colours, element by element.
    const AdamTable* steps = reinterpret_cast<const AdamTable*>(record);
    const long long first = static_cast<long long>(blockIdx.x) * THREADS;
    for (int item = threadIdx.x; item < count * FEATURES; item += THREADS) {
        const int place = item / FEATURES, element = item - place * FEATURES;
        const bool rest = element >= 3;
        const long long at = rest ? (first + due[place]) * REST + element - 3 : (first + due[place]) * 3 + element;
        float* parameter = (rest ? features_rest : features_dc) + at;
        float* exp_avg = (rest ? features_rest_1 : features_dc_1) + at;
        float* exp_avg_sq = (rest ? features_rest_2 : features_dc_2) + at;
        const int name = rest ? REST_NAME : DC_NAME;
        float p = *parameter, m = *exp_avg, v = *exp_avg_sq;
        adam_coast(steps, fastest[name], name, behind_from[place], to, p, m, v);
        *parameter = p, *exp_avg = m, *exp_avg_sq = v;
    }
}

// Puts the step that has just been taken on record. One thread.
extern "C" __global__ void __launch_bounds__(32)
record_step(const float* __restrict__ adam,  // AdamTable
            float* record,                   // [steps] AdamTable
            float* fastest,                  // [6]
            int* recorded,                   // [1]
            const long long* state) {
    if (step_state(state).halted || threadIdx.x > 0) return;
    const AdamTable step = *reinterpret_cast<const AdamTable*>(adam);
    reinterpret_cast<AdamTable*>(record)[*recorded] = step;
    for (int name = 0; name < 6; ++name)
        fastest[name] = larger(fastest[name], step.step_sizes[name] / step.root_correction);
    *recorded += 1;
}
