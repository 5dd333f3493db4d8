// Derivative of projection: from gradient rows, one a record, to gradients of the trained parameters, summed over the
// views of the round; and, fused with it, the optimizer's step, so that gradients never reach memory.
//
// A block owns 128 consecutive Gaussians. Each thread differentiates one of them; then the block goes through the
// parameters of all 128, which are consecutive in memory, element by element.
//
// Compile-time: SH_DEGREE (degrees in use), SH_STORED (rows of features_rest), and as 0 or 1 ANTIALIASED, MULTI_VIEW,
// SQUARES (sum the squares of each view's gradient too), POSES (differentiate with respect to the cameras too), FUSED
// (step the optimizer instead of writing gradients; with SQUARES its moments average over the views), DEFERRED (but not
// the colours of Gaussians that no view shows; see catch_up.cu).
#include "adam.h"
#include "projection.h"
#include "harmonics.h"
#include "step.h"

using namespace bytesplat;

constexpr int THREADS = 128;
constexpr int REST = 3 * SH_STORED;                       // floats of features_rest of a Gaussian
constexpr int REST_USED = 3 * (sh_functions(SH_DEGREE) - 1);  // of which so many have a gradient
constexpr int STAGE = harmonics_stride(SH_DEGREE) > REST ? harmonics_stride(SH_DEGREE) : REST;

// Gradients of a block's Gaussians, in the memory layout of the parameters.
struct __align__(16) Gradients {
    float means[3 * THREADS], quats[4 * THREADS], scales[3 * THREADS], opacities[THREADS], features_dc[3 * THREADS];
};

// What the kernels are given about the scene.
struct Scene {
    const float *means, *quats, *scales, *opacities, *features_rest;
    const float *viewmats, *intrinsics;
    const int* sizes;
    int gaussians, views, blocks_per_view;
    float dilation;
    const float *table, *rows;      // [M, RECORD_STRIDE], [M, row_stride]
    const int* record_gaussian;     // [M]
    const long long* starts;
    int row_stride;
};

constexpr int POSE_SUMS = 64;

// Sums 12 numbers over the warp and adds them to one of POSE_SUMS sums of dL/dviewmat [4, 4].
__device__ inline void add_pose_gradient(float viewmat_gradient[3][4], float* d_viewmat) {
    for (int i = 0; i < 12; ++i) {
        float value = viewmat_gradient[i / 4][i % 4];
        for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
        if (threadIdx.x % WARP == 0) atomicAdd(d_viewmat + i, value);
    }
}

// What a thread sums over the views of its Gaussian.
struct Sums {
    Shape<float> shape = {};
    float dc[3] = {}, rest[REST_USED > 0 ? REST_USED : 1] = {};

    // Calls add(sum, value) for all elements of a view's shape.
    template <class Add> __device__ void add_shape(const Shape<float>& of_view, Add add) {
        for (int i = 0; i < 3; ++i) add(shape.mean[i], of_view.mean[i]);
        for (int i = 0; i < 4; ++i) add(shape.quat[i], of_view.quat[i]);
        for (int i = 0; i < 3; ++i) add(shape.scale[i], of_view.scale[i]);
        add(shape.opacity, of_view.opacity);
    }

    // Into shared memory, as the parameters of the block lie in memory: `shared` and `rest` [THREADS, SH_STORED, 3].
    __device__ void lay_out(Gradients& shared, float* rest_of_block, float factor) const {
        const int t = threadIdx.x;
        if (SQUARES) __syncthreads();  // nobody reads any more what was there before
        for (int i = 0; i < 3; ++i) shared.means[3 * t + i] = factor * shape.mean[i];
        for (int i = 0; i < 3; ++i) shared.scales[3 * t + i] = factor * shape.scale[i];
        for (int i = 0; i < 4; ++i) shared.quats[4 * t + i] = factor * shape.quat[i];
        shared.opacities[t] = factor * shape.opacity;
        for (int c = 0; c < 3; ++c) shared.features_dc[3 * t + c] = factor * dc[c];
        __syncthreads();  // all warps have read their coefficients
#pragma unroll
        for (int i = 0; i < REST; ++i) rest_of_block[REST * t + i] = i < REST_USED ? factor * rest[i] : 0.0f;
        __syncthreads();
    }
};

// The gradients of this thread's Gaussian, and with SQUARES the squares of those of each view. `stages` [THREADS, STAGE]:
// shared memory; `shown` [THREADS]: whether any view shows the block's Gaussians.
__device__ inline void differentiate(const Scene& scene, Sums& gradients, Sums& squares, float* stages, bool* shown,
                                     float* d_viewmats) {
    __shared__ int record_of[THREADS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first = blockIdx.x * THREADS, gaussian = first + threadIdx.x;
    if (DEFERRED) shown[threadIdx.x] = false;

    // On its way while the record is looked for.
    Shape<float> shape = {};
    if (gaussian < scene.gaussians) {
        const float4 quat = reinterpret_cast<const float4*>(scene.quats)[gaussian];
        shape.quat[0] = quat.x, shape.quat[1] = quat.y, shape.quat[2] = quat.z, shape.quat[3] = quat.w;
        for (int i = 0; i < 3; ++i) shape.mean[i] = scene.means[3ll * gaussian + i];
        for (int i = 0; i < 3; ++i) shape.scale[i] = scene.scales[3ll * gaussian + i];
        shape.opacity = scene.opacities[gaussian];
    }
    for (int view = 0; view < (MULTI_VIEW ? scene.views : 1); ++view) {
        // Phase 1: which record is the Gaussian's in this view.
        const long long* starts = scene.starts + static_cast<long long>(view) * scene.blocks_per_view + blockIdx.x;
        record_of[threadIdx.x] = -1;
        __syncthreads();
        if (starts[0] + threadIdx.x < starts[1])
            record_of[scene.record_gaussian[starts[0] + threadIdx.x] - first] = threadIdx.x;
        __syncthreads();
        const bool visible = record_of[threadIdx.x] >= 0;
        if (DEFERRED && visible) shown[threadIdx.x] = true;
        const long long record = starts[0] + record_of[threadIdx.x];
        __syncthreads();
        float viewmat_gradient[3][4] = {};
        float* stage = stages + warp * WARP * STAGE;
        fetch_harmonics<SH_DEGREE, SH_STORED>(scene.features_rest, gaussian - lane, visible, stage);
        const int rank = __popc(__ballot_sync(ALL_LANES, visible) & lanes_below());
        const float* coefficients = stage + rank * harmonics_stride(SH_DEGREE);

        if (visible) {
            // Phase 2: shape.
            Shape<float> of_view = {};
            Shape<float>& gradient = SQUARES ? of_view : gradients.shape;
            const Camera<float> camera =
                load_camera(scene.viewmats + 16 * view, scene.intrinsics + 4 * view, scene.sizes + 2 * view);
            const float4* row = reinterpret_cast<const float4*>(scene.rows + record * scene.row_stride);
            const float4 A = row[0], B = row[1];
            const float2 C = *reinterpret_cast<const float2*>(row + 2);
            const RecordGradient<float> upstream = {{A.x, A.y}, {A.z, A.w, B.x}, B.y, C.y};
            const Projection<float> projection = project_shape(shape, camera, scene.dilation, ANTIALIASED);
            project_shape_backward(shape, camera, projection, ANTIALIASED, upstream, gradient, viewmat_gradient);

            // Phase 3: colour, zero where it was clamped. Each coefficient's gradient is a function's value times this.
            const float* rgb = scene.table + record * RECORD_STRIDE + RGB;
            const float d_rgb[3] = {rgb[0] > 0.0f ? B.z : 0.0f, rgb[1] > 0.0f ? B.w : 0.0f, rgb[2] > 0.0f ? C.x : 0.0f};
            float centre[3], direction[3], basis[SH_FUNCTIONS_MAX], weights[SH_FUNCTIONS_MAX], d_direction[3];
            camera_centre(camera, centre);
            const float inverse_distance = view_direction(shape.mean, centre, direction);
            sh_basis(SH_DEGREE, direction[0], direction[1], direction[2], basis);
            for (int c = 0; c < 3; ++c) gradients.dc[c] += basis[0] * d_rgb[c];
#pragma unroll
            for (int k = 1; k < sh_functions(SH_DEGREE); ++k) {
                const float* coefficient = coefficients + 3 * (k - 1);
                weights[k] = d_rgb[0] * coefficient[0] + d_rgb[1] * coefficient[1] + d_rgb[2] * coefficient[2];
                for (int c = 0; c < 3; ++c) gradients.rest[3 * (k - 1) + c] += basis[k] * d_rgb[c];
            }
            sh_direction_gradient(SH_DEGREE, direction[0], direction[1], direction[2], weights, d_direction);
            view_direction_backward(camera, centre, direction, inverse_distance, d_direction, gradient.mean,
                                    viewmat_gradient);

            // Phase 4: squares. The view's gradient is whole now.
            if (SQUARES) {
                const auto add_square = [](float& sum, float value) { sum += value * value; };
                gradients.add_shape(of_view, [](float& sum, float value) { sum += value; });
                squares.add_shape(of_view, add_square);
                for (int c = 0; c < 3; ++c) add_square(squares.dc[c], basis[0] * d_rgb[c]);
#pragma unroll
                for (int i = 0; i < REST_USED; ++i) add_square(squares.rest[i], basis[i / 3 + 1] * d_rgb[i % 3]);
            }
        }
        if (POSES) {
            const int sum = blockIdx.x % POSE_SUMS;
            add_pose_gradient(viewmat_gradient, d_viewmats + 16ll * (sum * scene.views + view));
        }
        __syncwarp();
    }
}

// One parameter of this block's Gaussians, WIDTH floats each. FUSED: a step of Adam, whose moments are `first` and
// `second`, on the gradient plus `extra` (or null); otherwise the gradient is written to `first`. Four floats at a time;
// only the last block may have an odd rest. ONLY_SHOWN: of the Gaussians that are `shown` [THREADS]; no four floats are of
// more than two.
//
// With SQUARES it is called twice, first with the gradients' squares (`squared`), which the second moment averages (if not
// FUSED, they are written to `second`). `share` is the part of `extra` that is one view's.
template <int WIDTH, bool ONLY_SHOWN = false>
__device__ inline void finish(bool squared, const float* gradient, float* __restrict__ parameter,
                              float* __restrict__ first, float* __restrict__ second, const float* __restrict__ extra,
                              int gaussians, const AdamStep& adam, float share, const bool* shown = nullptr) {
    static_assert(!ONLY_SHOWN || WIDTH >= 3);
    const auto takes_part = [&](int element) { return !ONLY_SHOWN || shown[element / (WIDTH > 0 ? WIDTH : 1)]; };
    const auto update = [&](float g, float& p, float& m, float& v) {
        if (squared) adam_average(adam, g, v);
        else if (SQUARES) adam_move(adam, g, p, m, v);
        else adam_update(adam, g, p, m, v);
    };
    const auto penalize = [&](float g, float more, float& v) {  // g^2 instead of (g - more)^2
        v += adam.second_rate * more * (2.0f * g - more);
    };
    const long long base = static_cast<long long>(blockIdx.x) * THREADS * WIDTH;
    const int count = smaller(THREADS, gaussians - static_cast<int>(blockIdx.x) * THREADS) * WIDTH;
    if (FUSED) parameter += base;
    if (FUSED || squared) second += base;
    if (FUSED && extra) extra += base;
    first += base;
#pragma unroll 4
    for (int i = threadIdx.x; i < count / 4; i += THREADS) {
        if (!takes_part(4 * i) && !takes_part(4 * i + 3)) continue;
        float4 g = reinterpret_cast<const float4*>(gradient)[i];
        if (!FUSED) {
            reinterpret_cast<float4*>(squared ? second : first)[i] = g;
            continue;
        }
        float4 more = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!squared && extra) {
            more = reinterpret_cast<const float4*>(extra)[i];
            if (SQUARES) more.x *= share, more.y *= share, more.z *= share, more.w *= share;
            g.x += more.x, g.y += more.y, g.z += more.z, g.w += more.w;
        }
        float4 p = reinterpret_cast<float4*>(parameter)[i], m = reinterpret_cast<float4*>(first)[i];
        float4 v = reinterpret_cast<float4*>(second)[i];
        if (SQUARES && !squared && extra) {
            penalize(g.x, more.x, v.x), penalize(g.y, more.y, v.y);
            penalize(g.z, more.z, v.z), penalize(g.w, more.w, v.w);
        }
        if (takes_part(4 * i)) update(g.x, p.x, m.x, v.x);
        if (takes_part(4 * i + 1)) update(g.y, p.y, m.y, v.y);
        if (takes_part(4 * i + 2)) update(g.z, p.z, m.z, v.z);
        if (takes_part(4 * i + 3)) update(g.w, p.w, m.w, v.w);
        if (!squared) reinterpret_cast<float4*>(parameter)[i] = p;
        if (!squared) reinterpret_cast<float4*>(first)[i] = m;
        if (squared || !SQUARES || extra) reinterpret_cast<float4*>(second)[i] = v;
    }
    const int i = count / 4 * 4 + threadIdx.x;
    if (i >= count || !takes_part(i)) return;
    float g = gradient[i];
    if (!FUSED) {
        (squared ? second : first)[i] = g;
        return;
    }
    if (!squared && extra) {
        const float more = SQUARES ? share * extra[i] : extra[i];
        g += more;
        if (SQUARES) penalize(g, more, second[i]);
    }
    update(g, parameter[i], first[i], second[i]);
}

// For each parameter: its values; FUSED its moments and what regularizers add to its gradient (or null), otherwise its
// gradient in place of the first moment, with SQUARES the squares in place of the second, and nothing for the others.
extern "C" __global__ void __launch_bounds__(THREADS, MULTI_VIEW ? 2 : 5)
project_backward(float* means, float* means_1, float* means_2, const float* means_extra,                  // [N, 3]
                 float* quats, float* quats_1, float* quats_2, const float* quats_extra,                  // [N, 4]
                 float* scales, float* scales_1, float* scales_2, const float* scales_extra,              // [N, 3]
                 float* opacities, float* opacities_1, float* opacities_2, const float* opacities_extra,  // [N, 1]
                 float* features_dc, float* features_dc_1, float* features_dc_2, const float* features_dc_extra,
                 float* features_rest, float* features_rest_1, float* features_rest_2, const float* features_rest_extra,
                 int gaussians,        // N
                 const float* adam,    // AdamTable, if FUSED
                 const float* __restrict__ viewmats,    // [V, 4, 4] world to camera
                 const float* __restrict__ intrinsics,  // [V, 4] fx, fy, cx, cy
                 const int* __restrict__ sizes,         // [V, 2] width, height
                 int views, int blocks_per_view, float dilation,
                 const float* __restrict__ table,          // [M, RECORD_STRIDE]
                 const float* __restrict__ rows,           // [M, row_stride] dL/d(record)
                 int row_stride,
                 const int* __restrict__ record_gaussian,  // [M]
                 const long long* __restrict__ starts,     // from find_starts
                 float* __restrict__ d_viewmats,           // [POSE_SUMS, V, 4, 4] zero, if POSES
                 int* __restrict__ caught_up,              // [N] steps on record that colours have had, if DEFERRED
                 const int* __restrict__ recorded,         // [1] of so many, this one not among them
                 const long long* state) {
    if (step_state(state).halted) return;
    __shared__ Gradients shared;
    __shared__ __align__(16) float rest[THREADS * (STAGE > 0 ? STAGE : 1)];
    const Scene scene = {means, quats, scales, opacities, features_rest, viewmats, intrinsics, sizes, gaussians, views,
                         blocks_per_view, dilation, table, rows, record_gaussian, starts, row_stride};
    __shared__ bool shown[DEFERRED ? THREADS : 1];
    Sums gradients, squares;
    differentiate(scene, gradients, squares, rest, shown, d_viewmats);

    AdamTable table_of_step = {};
    if (FUSED) table_of_step = *reinterpret_cast<const AdamTable*>(adam);
    const auto step = [&](int parameter) { return table_of_step.step(parameter); };
    const float share = FUSED && SQUARES ? 1.0f / views : 1.0f;
#pragma unroll
    for (int squared = SQUARES; squared >= 0; --squared) {
        (squared ? squares : gradients).lay_out(shared, rest, share);
        finish<3>(squared, shared.means, means, means_1, means_2, means_extra, gaussians, step(0), share);
        finish<4>(squared, shared.quats, quats, quats_1, quats_2, quats_extra, gaussians, step(1), share);
        finish<3>(squared, shared.scales, scales, scales_1, scales_2, scales_extra, gaussians, step(2), share);
        finish<1>(squared, shared.opacities, opacities, opacities_1, opacities_2, opacities_extra, gaussians, step(3),
                  share);
        finish<3, DEFERRED>(squared, shared.features_dc, features_dc, features_dc_1, features_dc_2, features_dc_extra,
                            gaussians, step(4), share, shown);
        if (REST > 0)
            finish<REST, DEFERRED && (REST > 0)>(squared, rest, features_rest, features_rest_1, features_rest_2,
                                                 features_rest_extra, gaussians, step(5), share, shown);
    }
    if (DEFERRED && shown[threadIdx.x]) caught_up[blockIdx.x * THREADS + threadIdx.x] = *recorded + 1;
}
