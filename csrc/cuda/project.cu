// Projection: what each Gaussian looks like in each view (projection.h, sh.h), visible pairs packed one after another.
//
// Compile-time: SH_DEGREE (degrees in use), SH_STORED (rows of features_rest), ANTIALIASED (0, 1).
#include "projection.h"
#include "harmonics.h"
#include "lookback.h"
#include "step.h"

using namespace bytesplat;

constexpr int THREADS = 128;

// Colour of a Gaussian seen from the camera's centre, before clamping.
__device__ inline void shade(const float mean[3], const float centre[3], const float* dc, const float* rest,
                             float rgb[3]) {
    float direction[3], basis[SH_FUNCTIONS_MAX];
    view_direction(mean, centre, direction);
    sh_basis(SH_DEGREE, direction[0], direction[1], direction[2], basis);
    for (int c = 0; c < 3; ++c) rgb[c] = basis[0] * dc[c] + 0.5f;
#pragma unroll
    for (int k = 1; k < sh_functions(SH_DEGREE); ++k)
        for (int c = 0; c < 3; ++c) rgb[c] += basis[k] * rest[3 * (k - 1) + c];
}

// One thread a (view, Gaussian); blocks_per_view blocks a view. state: StepState, zero at first.
extern "C" __global__ void __launch_bounds__(THREADS)
project(const float* __restrict__ means,          // [N, 3] world
        const float* __restrict__ quats,          // [N, 4] w, x, y, z
        const float* __restrict__ scales,         // [N, 3] log
        const float* __restrict__ opacities,      // [N, 1] logit
        const float* __restrict__ features_dc,    // [N, 3]
        const float* __restrict__ features_rest,  // [N, SH_STORED, 3]
        const long long* __restrict__ ids,        // [N]
        int gaussians,                            // N
        int blocks_per_view,
        const float* __restrict__ viewmats,    // [V, 4, 4] world to camera
        const float* __restrict__ intrinsics,  // [V, 4] fx, fy, cx, cy
        const int* __restrict__ sizes,         // [V, 2] width, height
        float near_plane, float far_plane, float dilation,
        float* __restrict__ table,          // [capacity, RECORD_STRIDE]
        int* __restrict__ record_gaussian,  // [capacity]
        int* __restrict__ record_view,      // [capacity]
        float* __restrict__ record_radius,  // [capacity]
        long long* __restrict__ record_id,  // [capacity]
        long long capacity,
        unsigned* counter,              // [1] zero
        unsigned long long* lookback,   // [blocks] zero
        long long* state) {
    constexpr int STRIDE = harmonics_stride(SH_DEGREE);
    __shared__ float stage[THREADS / WARP][WARP * STRIDE];
    __shared__ unsigned long long before_block;
    const unsigned block = ordered_block(counter);
    const int view = block / blocks_per_view;
    const int gaussian = (block % blocks_per_view) * THREADS + threadIdx.x;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    // Phase 1: shape. What is not between the planes is not even read.
    const Camera<float> camera = load_camera(viewmats + 16 * view, intrinsics + 4 * view, sizes + 2 * view);
    Shape<float> shape;
    Projection<float> projection;
    bool visible = gaussian < gaussians;
    if (visible) {
        for (int i = 0; i < 3; ++i) shape.mean[i] = means[3ll * gaussian + i];
        float seen[3];
        camera_mean(camera, shape.mean, seen);
        visible = seen[2] > near_plane && seen[2] < far_plane;
    }
    if (visible) {
        const float4 quat = reinterpret_cast<const float4*>(quats)[gaussian];
        shape.quat[0] = quat.x, shape.quat[1] = quat.y, shape.quat[2] = quat.z, shape.quat[3] = quat.w;
        for (int i = 0; i < 3; ++i) shape.scale[i] = scales[3ll * gaussian + i];
        shape.opacity = opacities[gaussian];
        projection = project_shape(shape, camera, dilation, ANTIALIASED);
        visible = projection_visible(projection, camera, near_plane, far_plane);
    }

    // Phase 2: colour.
    const int rank_in_warp = __popc(__ballot_sync(ALL_LANES, visible) & lanes_below());
    fetch_harmonics<SH_DEGREE, SH_STORED>(features_rest, gaussian - lane, visible, stage[warp]);
    float rgb[3];
    if (visible) {
        float centre[3];
        camera_centre(camera, centre);
        shade(shape.mean, centre, features_dc + 3ll * gaussian, stage[warp] + rank_in_warp * STRIDE, rgb);
        visible = is_finite(rgb[0] + rgb[1] + rgb[2]);
    }

    // Phase 3: a row for each visible pair, in the order of views, then of Gaussians.
    unsigned in_block;
    const unsigned rank = exclusive_sum_in_block<THREADS, unsigned>(visible, in_block);
    if (warp == 0) {
        const uint64 before = exclusive_sum_of_blocks(lookback, block, in_block);
        if (lane == 0) before_block = before;
        if (lane == 0 && block == gridDim.x - 1) {
            const long long total = before + in_block;
            step_state(state).records = total;
            if (total > capacity) step_state(state).halted = 1;
        }
    }
    __syncthreads();
    const long long row = before_block + rank;
    if (!visible || row >= capacity) return;
    const Projection<float>& p = projection;
    float4* out = reinterpret_cast<float4*>(table) + row * (RECORD_STRIDE / 4);
    out[0] = make_float4(p.mean2d[0], p.mean2d[1], p.conic[0], p.conic[1]);
    out[1] = make_float4(p.conic[2], p.opacity, larger(rgb[0], 0.0f), larger(rgb[1], 0.0f));
    out[2] = make_float4(larger(rgb[2], 0.0f), p.mean[2], 0.0f, 0.0f);
    record_gaussian[row] = gaussian;
    record_view[row] = view;
    record_radius[row] = p.radius;
    record_id[row] = ids[gaussian];
}
