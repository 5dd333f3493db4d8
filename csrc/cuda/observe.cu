// Statistics of density control: what a round's gradient rows say about each Gaussian, added to what earlier rounds said.
//
// The same bits as ops.reference.observe: in float64, step by step (nothing contracted), to the float32 that ranks send
// each other, then to integers, whose sums know no order.
//
// Compile-time: ABSOLUTE, the sum over pixels of absolute gradients (1) or the gradient (0).
#include "device.h"
#include "step.h"

using namespace bytesplat;

constexpr int THREADS = 256;

// One thread a record.
extern "C" __global__ void __launch_bounds__(THREADS)
observe(const float* __restrict__ rows,             // [M, row_stride] gradient rows with statistics
        int row_stride,
        const int* __restrict__ record_gaussian,    // [M]
        const int* __restrict__ record_view,        // [M]
        const float* __restrict__ record_radius,    // [M] pixels
        const int* __restrict__ sizes,              // [V, 2] width, height
        unsigned long long* __restrict__ gradient,  // [N] in GRADIENT_UNIT, per half image side
        int* __restrict__ views,                    // [N]
        int* __restrict__ radius,                   // [N] bits of floats that are not negative: ordered as they are
        const long long* state) {
    const StepState& step = step_state(state);
    const long long record = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (step.halted || record >= step.records) return;
    const int gaussian = record_gaussian[record];
    const int* size = sizes + 2 * record_view[record];
    const float* row = rows + record * row_stride + (ABSOLUTE ? ABSGRAD : MEAN2D);
    const double half = size[0] / 2.0, x = row[0] * half, y = row[1] * (size[1] / 2.0);
    const float along_x = static_cast<float>(sqrt(__dadd_rn(__dmul_rn(x, x), __dmul_rn(y, y))) / half);
    double norm = along_x * half;
    norm = norm == norm ? fmin(norm, static_cast<double>(GRADIENT_MAX)) : 0.0;
    atomicAdd(gradient + gaussian, static_cast<unsigned long long>(rint(norm / GRADIENT_UNIT)));
    atomicAdd(views + gaussian, 1);
    // A quotient of floats formed in float64 rounds to what float32's own division gives.
    const double part = static_cast<double>(record_radius[record]) / max(size[0], size[1]);
    atomicMax(radius + gaussian, __float_as_int(static_cast<float>(part)));
}
