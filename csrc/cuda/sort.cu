// Radix sort of (key, value) pairs, least significant digit first: one launch a digit of 8 bits, each key read once
// and written once (Adinets & Merrill 2022, "Onesweep"). Stable. How many pairs there are is known to the device
// alone.
//
// A block ranks its pairs by digit, learns from its predecessors by look-back how many pairs of each digit come
// before its own, reorders its pairs in shared memory and writes runs of equal digits.
//
// Compile-time: COUNT, which of StepState's counts says how many pairs there are (0 records, 1 pairs); ITEMS, the
// pairs of a thread: many for long inputs, few where there would not be a block for every multiprocessor.
#include "lookback.h"
#include "platform.h"
#include "step.h"

using namespace bytesplat;

constexpr int DIGITS = 256;
constexpr int THREADS = DIGITS;  // thread d also looks after digit d
constexpr int WARPS = THREADS / WARP;
constexpr int BLOCK_PAIRS = THREADS * ITEMS;

// Lanes of the warp whose digit is the same as this lane's; digit DIGITS stands for no pair.
__device__ inline unsigned lanes_with(unsigned digit) {
    unsigned same = ALL_LANES;
#pragma unroll
    for (int bit = 0; bit < 9; ++bit) {
        const unsigned set = __ballot_sync(ALL_LANES, digit >> bit & 1);
        same &= digit >> bit & 1 ? set : ~set;
    }
    return same;
}

extern "C" __global__ void __launch_bounds__(THREADS, ITEMS > 8 ? 3 : 4)
sort_digit(const unsigned* __restrict__ keys,
           const unsigned* __restrict__ values,
           unsigned* __restrict__ sorted_keys,
           unsigned* __restrict__ sorted_values,
           int shift,                                     // lowest bit of the digit
           const unsigned long long* __restrict__ histogram,  // [DIGITS] how often each digit occurs
           unsigned* counter,                             // [1] zero
           unsigned long long* lookback,                  // [blocks, DIGITS] zero
           const long long* state) {
    if (step_state(state).halted) return;
    const long long count = COUNT == 0 ? step_state(state).records : step_state(state).pairs;
    __shared__ unsigned starts[WARPS][DIGITS];  // how many of a warp's pairs have the digit, then where they start
    __shared__ unsigned sorted_key[BLOCK_PAIRS], sorted_value[BLOCK_PAIRS];
    __shared__ unsigned destination[DIGITS];  // where the block's first pair of a digit goes, less its place here
    const unsigned block = ordered_block(counter);
    const long long first = static_cast<long long>(block) * BLOCK_PAIRS;
    if (first >= count) return;
    const int here = static_cast<int>(smaller(count - first, static_cast<long long>(BLOCK_PAIRS)));
    keys += first, values += first;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    // Phase 1: ranks among the warp's pairs. Item i of the warp's lanes comes before item i + 1: the sort is stable.
    for (int w = 0; w < WARPS; ++w) starts[w][threadIdx.x] = 0;
    const int mine = warp * (WARP * ITEMS) + lane;
    unsigned key[ITEMS], rank[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) key[i] = mine + i * WARP < here ? keys[mine + i * WARP] : 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const unsigned digit = mine + i * WARP < here ? key[i] >> shift & (DIGITS - 1) : DIGITS;
        const unsigned same = lanes_with(digit);
        const unsigned before = digit < DIGITS ? starts[warp][digit] : 0;
        __syncwarp();
        rank[i] = before + __popc(same & lanes_below());
        if (digit < DIGITS && (same & lanes_below()) == 0) starts[warp][digit] = before + __popc(same);
        __syncwarp();
    }
    __syncthreads();

    // Phase 2: where each digit starts in the block, and each warp's share of it.
    const unsigned digit = threadIdx.x;
    unsigned in_block = 0;
    for (int w = 0; w < WARPS; ++w) {
        const unsigned of_warp = starts[w][digit];
        starts[w][digit] = in_block;
        in_block += of_warp;
    }
    unsigned total;
    const unsigned start = exclusive_sum_in_block<THREADS, unsigned>(in_block, total);
    for (int w = 0; w < WARPS; ++w) starts[w][digit] += start;
    __syncthreads();

    // Phase 3: the pairs in order, in shared memory.
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (mine + i * WARP < here) {
            const unsigned place = rank[i] + starts[warp][key[i] >> shift & (DIGITS - 1)];
            sorted_key[place] = key[i], sorted_value[place] = values[mine + i * WARP];
        }

    // Phase 4: where each digit starts in the output: smaller digits, then the same digit in earlier blocks.
    const uint64 earlier = exclusive_sum_of_blocks_alone(lookback + digit, block, DIGITS, in_block);
    uint64 all;
    const uint64 smaller_digits = exclusive_sum_in_block<THREADS, uint64>(histogram[digit], all);
    destination[digit] = static_cast<unsigned>(smaller_digits + earlier) - start;
    __syncthreads();

    // Phase 5: runs of equal digits to where they belong.
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const unsigned place = i * THREADS + threadIdx.x;
        if (place >= total) break;
        const unsigned key_here = sorted_key[place], out = destination[key_here >> shift & (DIGITS - 1)] + place;
        sorted_keys[out] = key_here, sorted_values[out] = sorted_value[place];
    }
}
