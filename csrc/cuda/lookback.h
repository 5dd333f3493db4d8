// Prefix sums over the blocks of one launch, in one pass (Merrill & Garland 2016, "Single-pass Parallel Prefix Scan
// with Decoupled Look-back").
//
// Each block publishes the sum of its own elements, then adds up what its predecessors published, back to the first
// one that already knows its own prefix, and publishes its prefix in turn. A block only ever waits for blocks that
// took their number before it and so are running: this cannot deadlock. Words start at zero.
#pragma once
#include "device.h"

namespace bytesplat {

constexpr uint64 LOOKBACK_SUM = 1ull << 62;     // the word holds a block's own sum
constexpr uint64 LOOKBACK_PREFIX = 2ull << 62;  // the word holds the sum of a block and all before it
constexpr uint64 LOOKBACK_VALUE = LOOKBACK_SUM - 1;

// A block's place in the order in which blocks started; the same for all its threads. `counter` starts at zero.
__device__ inline unsigned ordered_block(unsigned* counter) {
    __shared__ unsigned number;
    if (threadIdx.x == 0) number = atomicAdd(counter, 1u);
    __syncthreads();
    return number;
}

// For one whole warp of block `block`: the sum over all earlier blocks. words: one a block.
__device__ inline uint64 exclusive_sum_of_blocks(uint64* words, unsigned block, uint64 own_sum) {
    const int lane = threadIdx.x % WARP;
    if (lane == 0) store_shared_word(words + block, (block == 0 ? LOOKBACK_PREFIX : LOOKBACK_SUM) | own_sum);
    uint64 before = 0;
    for (long long nearest = static_cast<long long>(block) - 1; nearest >= 0; nearest -= WARP) {
        // Lane l watches the l-th block before; there is a zero prefix ahead of the first block.
        uint64 word = nearest >= lane ? 0 : LOOKBACK_PREFIX;
        do {
            if (word == 0) word = load_shared_word(words + nearest - lane);
        } while (__any_sync(ALL_LANES, word == 0));
        const unsigned prefixes = __ballot_sync(ALL_LANES, word >= LOOKBACK_PREFIX);
        const int last = prefixes ? __ffs(prefixes) - 1 : WARP - 1;
        uint64 value = lane <= last ? word & LOOKBACK_VALUE : 0;
        for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
        before += value;
        if (prefixes) break;
    }
    if (lane == 0 && block > 0) store_shared_word(words + block, LOOKBACK_PREFIX | (before + own_sum));
    return before;
}

// The same for one thread alone, which owns one of several independent sums. words: `stride` words from block to block.
__device__ inline uint64 exclusive_sum_of_blocks_alone(uint64* words, unsigned block, unsigned stride, uint64 own_sum) {
    uint64* own = words + static_cast<uint64>(block) * stride;
    store_shared_word(own, (block == 0 ? LOOKBACK_PREFIX : LOOKBACK_SUM) | own_sum);
    if (block == 0) return 0;
    constexpr int AT_ONCE = 4;  // words on their way together: what is waited for is memory's latency
    uint64 before = 0;
    for (unsigned nearest = block; nearest > 0;) {
        uint64 word[AT_ONCE];
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; ++i)
            word[i] = i < nearest ? load_shared_word(own - static_cast<uint64>(block - nearest + 1 + i) * stride)
                                  : LOOKBACK_PREFIX;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (word[i] == 0) break;  // not there yet: look again from here
            before += word[i] & LOOKBACK_VALUE;
            --nearest;
            if (word[i] >= LOOKBACK_PREFIX) {
                nearest = 0;
                break;
            }
        }
    }
    store_shared_word(own, LOOKBACK_PREFIX | (before + own_sum));
    return before;
}

// Exclusive sum over the threads of a block; `total` is the block's sum. All threads call it.
template <int THREADS, class T> __device__ inline T exclusive_sum_in_block(T value, T& total) {
    __shared__ T sums[THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    T inclusive = value;
    for (int step = 1; step < WARP; step *= 2) {
        const T left = __shfl_up_sync(ALL_LANES, inclusive, step);
        if (lane >= step) inclusive += left;
    }
    if (lane == WARP - 1) sums[warp] = inclusive;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int w = 0; w < THREADS / WARP; ++w) {
        if (w < warp) before += sums[w];
        total += sums[w];
    }
    __syncthreads();  // the sums may be written again
    return before + inclusive - value;
}

}  // namespace bytesplat
