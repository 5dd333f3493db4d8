// Gradient rows between ranks (EncodedRows in ops/layout.py): those that are bitwise zero stay at home, and what travels
// may be rounded to bfloat16.
//
// Rows come in parts, one for each rank; a block handles 256 rows of one part, a warp the rows of one word of its mask.
// Where a block's rows go among those that are left is known by look-back, so each row is read once and written once.
//
// Compile-time: COLUMNS (a bit for each column that travels), STRIDE (floats from one row to the next, a multiple of 4),
// BFLOAT16 (0 or 1).
#include "bfloat16.h"
#include "lookback.h"
#include "platform.h"

using namespace bytesplat;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

__device__ constexpr int columns_below(int column) {
    int count = 0;
    for (int c = 0; c < column; ++c) count += COLUMNS >> c & 1;
    return count;
}
constexpr int WIDTH = columns_below(32);  // of a row that travels

// A number on its way.
#if BFLOAT16
using Sent = unsigned short;
__device__ inline Sent sent(float value) { return bfloat16_of(__float_as_uint(value)); }
__device__ inline float received(Sent number) { return __uint_as_float(float_of_bfloat16(number)); }
#else
using Sent = float;
__device__ inline Sent sent(float value) { return value; }
__device__ inline float received(Sent number) { return number; }
#endif

// The rows of a block, and where the mask has them.
struct Place {
    int part;
    long long first;  // row
    int rows;         // of the part from there on, at most a block's
    long long word;  // of the first row
};

__device__ inline Place place_of(unsigned block, const long long* parts) {
    Place place = {0, 0, 0, 0};
    long long before = 0;  // blocks
    for (;; ++place.part) {
        const long long rows = parts[place.part], blocks = (rows + THREADS - 1) / THREADS;
        if (block < before + blocks) break;
        before += blocks;
        place.first += rows;
        place.word += (rows + WARP - 1) / WARP;
    }
    const long long within = (block - before) * THREADS;
    place.first += within;
    place.rows = static_cast<int>(smaller(parts[place.part] - within, static_cast<long long>(THREADS)));
    place.word += within / WARP;
    return place;
}

// From the words of a block's warps: how many rows are left before this thread's one in the block, and in all.
__device__ inline int rank_in_block(unsigned mask, int& total) {
    __shared__ int counts[WARPS];
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP == 0) counts[warp] = __popc(mask);
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += counts[w];
        total += counts[w];
    }
    return before + __popc(mask & lanes_below());
}

// How many rows are left in all blocks before this one; the same for all threads.
__device__ inline long long rows_before(unsigned long long* lookback, unsigned block, int in_block) {
    __shared__ unsigned long long before;
    if (threadIdx.x < WARP) {
        const uint64 sum = exclusive_sum_of_blocks(lookback, block, in_block);
        if (threadIdx.x == 0) before = sum;
    }
    __syncthreads();
    return before;
}

// A block for each 256 rows of a part.
extern "C" __global__ void __launch_bounds__(THREADS)
encode_rows(const float* __restrict__ rows,       // [M, STRIDE]
            const long long* __restrict__ parts,  // rows of each part
            int* __restrict__ mask,               // a word for each 32 rows of a part
            unsigned char* __restrict__ bytes,    // of left [M, WIDTH] Sent, of which the first rows are filled
            unsigned long long* counts,           // [parts] zero
            unsigned* counter,                    // [1] zero
            unsigned long long* lookback) {       // [blocks] zero
    __shared__ Sent stage[THREADS * WIDTH];
    const unsigned block = ordered_block(counter);
    const Place place = place_of(block, parts);
    const int row = threadIdx.x, warp = threadIdx.x / WARP;

    // Phase 1: which rows are left.
    float values[STRIDE] = {};
    if (row < place.rows)
        for (int i = 0; i < STRIDE / 4; ++i) {
            const float4 four = reinterpret_cast<const float4*>(rows + (place.first + row) * STRIDE)[i];
            values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
        }
    unsigned bits = 0;
#pragma unroll
    for (int c = 0; c < STRIDE; ++c)
        if (COLUMNS >> c & 1) bits |= __float_as_uint(values[c]);
    const unsigned word = __ballot_sync(ALL_LANES, bits != 0);
    int total;
    const int rank = rank_in_block(word, total);
    if (threadIdx.x % WARP == 0 && row < place.rows) mask[place.word + warp] = static_cast<int>(word);
    if (threadIdx.x == 0 && total > 0) atomicAdd(counts + place.part, static_cast<unsigned long long>(total));

    // Phase 2: they go one after another.
    if (bits != 0) {
#pragma unroll
        for (int c = 0; c < STRIDE; ++c)
            if (COLUMNS >> c & 1) stage[rank * WIDTH + columns_below(c)] = sent(values[c]);
    }
    const long long before = rows_before(lookback, block, total);
    Sent* left = reinterpret_cast<Sent*>(bytes);
    for (int i = threadIdx.x; i < total * WIDTH; i += THREADS) left[before * WIDTH + i] = stage[i];
}

// The reverse: rows that stayed at home, and columns that did not travel, are zero.
extern "C" __global__ void __launch_bounds__(THREADS)
decode_rows(const int* __restrict__ mask,
            const unsigned char* __restrict__ bytes,  // of left [rows left, WIDTH] Sent
            const long long* __restrict__ parts,      // rows of each part
            float* __restrict__ rows,                 // [M, STRIDE]
            unsigned* counter,                        // [1] zero
            unsigned long long* lookback) {           // [blocks] zero
    __shared__ Sent stage[THREADS * WIDTH];
    const unsigned block = ordered_block(counter);
    const Place place = place_of(block, parts);
    const int row = threadIdx.x, warp = threadIdx.x / WARP;

    const unsigned word = row / WARP * WARP < place.rows ? static_cast<unsigned>(mask[place.word + warp]) : 0;
    int total;
    const int rank = rank_in_block(word, total);
    const long long before = rows_before(lookback, block, total);
    const Sent* left = reinterpret_cast<const Sent*>(bytes);
    for (int i = threadIdx.x; i < total * WIDTH; i += THREADS) stage[i] = left[before * WIDTH + i];
    __syncthreads();

    if (row >= place.rows) return;
    const bool here = word >> threadIdx.x % WARP & 1;
    float values[STRIDE] = {};
#pragma unroll
    for (int c = 0; c < STRIDE; ++c)
        if (here && (COLUMNS >> c & 1)) values[c] = received(stage[rank * WIDTH + columns_below(c)]);
    for (int i = 0; i < STRIDE / 4; ++i)
        reinterpret_cast<float4*>(rows + (place.first + row) * STRIDE)[i] =
            make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
}
