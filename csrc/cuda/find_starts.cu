// Where the records of each block of Gaussians begin: records are in the order of views, then of Gaussians.
#include "step.h"

using namespace bytesplat;

constexpr int THREADS = 128;  // Gaussians of a block: those of project_backward.cu

// starts[v * blocks_per_view + b]: the first record of view v and block b of Gaussians, or of a later one.
extern "C" __global__ void __launch_bounds__(THREADS)
find_starts(const int* __restrict__ record_gaussian,  // [M]
            const int* __restrict__ record_view,      // [M]
            int blocks_per_view, int views,
            long long* __restrict__ starts,  // [V * blocks_per_view + 1]
            const long long* state) {
    if (step_state(state).halted) return;
    const long long records = step_state(state).records;
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (i > records) return;
    const auto block_of = [&](long long record) {
        return static_cast<long long>(record_view[record]) * blocks_per_view + record_gaussian[record] / THREADS;
    };
    const long long first = i == 0 ? 0 : block_of(i - 1) + 1;
    const long long last = i == records ? static_cast<long long>(views) * blocks_per_view : block_of(i);
    for (long long block = first; block <= last; ++block) starts[block] = i;
}
