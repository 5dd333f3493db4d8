// Tile lists: which records reach which tile, near to far.
//
// Records are sorted by depth once; their (tile, record) pairs are then made in that order, and a stable sort by tile alone
// leaves every tile's list sorted by depth. So the long sort has keys of 16 bits or so instead of 48.
#include "ellipse.h"
#include "lookback.h"
#include "step.h"

using namespace bytesplat;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int DIGITS = 256;

// One record and the tiles of the box around its ellipse, in shared memory: one a lane.
struct Candidates {
    float x, y, a, b, c, threshold;
    int first_x, first_y, columns, view;
    int end;  // of its tiles, numbering those of all lanes one after another
};

// The tiles of all lanes of a warp, 32 at a time, whoever they belong to: a huge Gaussian keeps no other waiting.
// Calls visit(reached, owner, tile) with the whole warp, where `reached` the ellipse meets the pixel centres of `tile`.
template <class Visit>
__device__ inline void for_each_tile(const float* row, int view, bool exists, const int* sizes, int tiles_x, int tiles_y,
                                     Candidates* candidates, Visit visit) {
    const int lane = threadIdx.x % WARP;
    Candidates mine = {};
    int cells = 0;
    if (exists) {
        const float4 A = reinterpret_cast<const float4*>(row)[0];
        const float2 B = reinterpret_cast<const float2*>(row)[2];
        mine = {A.x, A.y, A.z, A.w, B.x, ellipse_threshold(B.y), 0, 0, 0, view, 0};
        float extent[2];
        ellipse_half_extent(mine.a, mine.b, mine.c, mine.threshold, extent);
        // One tile of slack: which tiles are reached is decided tile by tile.
        const int last_x = (sizes[2 * view] - 1) / TILE, last_y = (sizes[2 * view + 1] - 1) / TILE;
        mine.first_x = static_cast<int>(clamp(floor((mine.x - extent[0]) / TILE - 0.1f), 0.0f, float(last_x)));
        mine.first_y = static_cast<int>(clamp(floor((mine.y - extent[1]) / TILE - 0.1f), 0.0f, float(last_y)));
        const int end_x = static_cast<int>(clamp(floor((mine.x + extent[0]) / TILE + 0.1f), 0.0f, float(last_x))) + 1;
        const int end_y = static_cast<int>(clamp(floor((mine.y + extent[1]) / TILE + 0.1f), 0.0f, float(last_y))) + 1;
        mine.columns = end_x - mine.first_x;
        cells = mine.columns * (end_y - mine.first_y);
    }
    int end = cells;
    for (int step = 1; step < WARP; step *= 2) {
        const int left = __shfl_up_sync(ALL_LANES, end, step);
        if (lane >= step) end += left;
    }
    mine.end = end;
    candidates[lane] = mine;
    const int total = __shfl_sync(ALL_LANES, end, WARP - 1);
    __syncwarp();

    for (int base = 0; base < total; base += WARP) {
        const int cell = base + lane;
        int owner = 0;  // the first lane whose tiles end behind this cell
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
            if (candidates[owner + step - 1].end <= cell) owner += step;
        bool reached = cell < total;
        int tile = 0;
        if (reached) {
            const Candidates& of = candidates[owner];
            const int number = cell - (owner > 0 ? candidates[owner - 1].end : 0);
            const int row = number / of.columns;
            const int tile_x = of.first_x + number - row * of.columns, tile_y = of.first_y + row;
            const float x0 = tile_x * TILE + 0.5f, x1 = smaller((tile_x + 1) * TILE, sizes[2 * of.view]) - 0.5f;
            const float y0 = tile_y * TILE + 0.5f, y1 = smaller((tile_y + 1) * TILE, sizes[2 * of.view + 1]) - 0.5f;
            reached = box_sigma(of.a, of.b, of.c, x0 - of.x, x1 - of.x, y0 - of.y, y1 - of.y) <= of.threshold;
            tile = (of.view * tiles_y + tile_y) * tiles_x + tile_x;
        }
        visit(reached, owner, tile, base);
    }
    __syncwarp();
}

// The lanes that hold cells of one owner while the warp looks at the cells from `base` on.
__device__ inline unsigned lanes_of(const Candidates* candidates, int owner, int base) {
    const int first = clamp((owner > 0 ? candidates[owner - 1].end : 0) - base, 0, WARP);
    const int end = clamp(candidates[owner].end - base, 0, WARP);
    return static_cast<unsigned>((1ull << end) - (1ull << first));
}

// Number of tiles of each record; keys and histograms of the sort by depth. histograms: [4, DIGITS] zero.
extern "C" __global__ void __launch_bounds__(THREADS)
count_tiles(const float* __restrict__ table,      // [M, RECORD_STRIDE]
            const int* __restrict__ record_view,  // [M]
            const int* __restrict__ sizes,        // [V, 2]
            int tiles_x, int tiles_y,
            unsigned* __restrict__ tile_count,  // [M]
            unsigned* __restrict__ keys,        // [M] bits of the depth, ordered as the (positive) depths are
            unsigned* __restrict__ values,      // [M] the record
            unsigned long long* histograms,
            const long long* state) {
    if (step_state(state).halted) return;
    const long long records = step_state(state).records;
    if (static_cast<long long>(blockIdx.x) * THREADS >= records) return;
    __shared__ Candidates candidates[WARPS][WARP];
    __shared__ unsigned counts[4][DIGITS];
    for (int place = 0; place < 4; ++place) counts[place][threadIdx.x] = 0;
    __syncthreads();

    const long long record = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const bool exists = record < records;
    const float* row = table + record * RECORD_STRIDE;
    unsigned tiles = 0;
    for_each_tile(row, exists ? record_view[record] : 0, exists, sizes, tiles_x, tiles_y, candidates[warp],
                  [&](bool reached, int, int, int base) {
                      const unsigned hits = __ballot_sync(ALL_LANES, reached);
                      tiles += __popc(hits & lanes_of(candidates[warp], lane, base));
                  });
    if (exists) {
        const unsigned key = __float_as_uint(row[DEPTH]);
        tile_count[record] = tiles;
        keys[record] = key;
        values[record] = static_cast<unsigned>(record);
        for (int place = 0; place < 4; ++place) atomicAdd(&counts[place][key >> 8 * place & (DIGITS - 1)], 1u);
    }
    __syncthreads();
    for (int place = 0; place < 4; ++place)
        if (counts[place][threadIdx.x])
            atomicAdd(histograms + place * DIGITS + threadIdx.x, static_cast<unsigned long long>(counts[place][threadIdx.x]));
}

// The (tile, record) pairs in the order of depth, and the histograms of the sort by tile.
// places: how many digits of 8 bits a tile's number has, at most 4.
extern "C" __global__ void __launch_bounds__(THREADS)
make_pairs(const float* __restrict__ table,             // [M, RECORD_STRIDE]
           const int* __restrict__ record_view,         // [M]
           const int* __restrict__ sizes,               // [V, 2]
           int tiles_x, int tiles_y,
           const unsigned* __restrict__ by_depth,    // [M] records, near to far
           const unsigned* __restrict__ tile_count,  // [M]
           unsigned* __restrict__ keys,              // [capacity] tile
           unsigned* __restrict__ values,            // [capacity] record
           long long capacity,
           int places,
           unsigned long long* histograms,  // [places, DIGITS] zero
           unsigned* counter,               // [1] zero
           unsigned long long* lookback,    // [blocks] zero
           long long* state) {
    if (step_state(state).halted) return;
    const long long records = step_state(state).records;
    __shared__ Candidates candidates[WARPS][WARP];
    __shared__ unsigned counts[4][DIGITS];
    __shared__ unsigned long long before_block;
    const unsigned block = ordered_block(counter);
    if (static_cast<long long>(block) * THREADS >= records) return;
    for (int place = 0; place < places; ++place) counts[place][threadIdx.x] = 0;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    // Phase 1: where each record's pairs go.
    const long long position = static_cast<long long>(block) * THREADS + threadIdx.x;
    const bool exists = position < records;
    const unsigned record = exists ? by_depth[position] : 0;
    unsigned in_block;
    const unsigned rank = exclusive_sum_in_block<THREADS, unsigned>(exists ? tile_count[record] : 0, in_block);
    if (warp == 0) {
        const uint64 before = exclusive_sum_of_blocks(lookback, block, in_block);
        if (lane == 0) before_block = before;
    }
    __syncthreads();
    const long long total = before_block + in_block;
    if (threadIdx.x == 0 && static_cast<long long>(block + 1) * THREADS >= records) {
        step_state(state).pairs = total;
        if (total > capacity) step_state(state).halted = 1;
    }
    if (total > capacity) return;

    // Phase 2: the pairs.
    unsigned long long next = before_block + rank;  // of the record that this lane owns
    for_each_tile(table + static_cast<long long>(record) * RECORD_STRIDE, exists ? record_view[record] : 0, exists, sizes,
                  tiles_x, tiles_y, candidates[warp], [&](bool reached, int owner, int tile, int base) {
                      const unsigned hits = __ballot_sync(ALL_LANES, reached);
                      const unsigned long long of_owner = __shfl_sync(ALL_LANES, next, owner);
                      const unsigned owned = __shfl_sync(ALL_LANES, record, owner);
                      next += __popc(hits & lanes_of(candidates[warp], lane, base));
                      if (!reached) return;
                      const unsigned before = hits & lanes_below() & lanes_of(candidates[warp], owner, base);
                      keys[of_owner + __popc(before)] = tile;
                      values[of_owner + __popc(before)] = owned;
                      for (int place = 0; place < places; ++place)
                          atomicAdd(&counts[place][tile >> 8 * place & (DIGITS - 1)], 1u);
                  });
    __syncthreads();
    for (int place = 0; place < places; ++place)
        if (counts[place][threadIdx.x])
            atomicAdd(histograms + place * DIGITS + threadIdx.x, static_cast<unsigned long long>(counts[place][threadIdx.x]));
}

// offsets[t]: the first pair of tile t or of a later one. One thread a pair and one for the end.
extern "C" __global__ void __launch_bounds__(THREADS)
find_offsets(const unsigned* __restrict__ keys,  // [P] sorted tiles
             long long tiles,
             long long* __restrict__ offsets,  // [tiles + 1]
             const long long* state) {
    if (step_state(state).halted) return;
    const long long pairs = step_state(state).pairs;
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (i > pairs) return;
    const long long first = i == 0 ? 0 : static_cast<long long>(keys[i - 1]) + 1;
    const long long last = i == pairs ? tiles : keys[i];
    for (long long tile = first; tile <= last; ++tile) offsets[tile] = i;
}
