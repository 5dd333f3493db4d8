// Tile lists: which records reach which tile, near to far.
//
// Records are sorted by depth once; their (tile, record) pairs are then made in that order, and a stable sort by tile
// alone leaves every tile's list sorted by depth. So the long sort has keys of 16 bits or so instead of 48.
//
// The tiles that an ellipse reaches in a row of tiles are a span, whose ends follow from the ellipse alone: no tile
// is tested.
#include "ellipse.h"
#include "lookback.h"
#include "step.h"

using namespace bytesplat;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int DIGITS = 256;

// The ellipse of a record and the rows of tiles that it reaches.
struct Ellipse {
    float x, y;          // centre, pixels
    float reach_x;       // half of its width
    float tilt;          // its rightmost point is so far above the centre, its leftmost one as far below
    float slope;         // middle of the chord at height dy: -slope dy
    float square, fall;  // square of half the chord's length at height dy: square - fall dy^2
    int first_row, rows, view;
    int end;  // of its rows, numbering those of a warp's ellipses one after another
};

// Tiles along one axis of `size` pixels whose pixel centres [low, high] may touch. May be empty, end <= first.
__device__ inline void tiles_between(float low, float high, int size, int& first, int& end) {
    const float last = (size - 1) / TILE;
    first = static_cast<int>(limit(ceil((low - (TILE - 0.5f)) * (1.0f / TILE)), 0.0f, last + 1.0f));
    end = static_cast<int>(limit(floor((high - 0.5f) * (1.0f / TILE)), -1.0f, last)) + 1;
    if (low > size - 0.5f) end = first;  // past the last pixel of the last tile
}

__device__ inline Ellipse ellipse_of(const float* row, int view, const int* sizes) {
    const float4 A = reinterpret_cast<const float4*>(row)[0];
    const float2 B = reinterpret_cast<const float2*>(row)[2];
    const float a = A.z, b = A.w, c = B.x, threshold = ellipse_threshold(B.y);
    float extent[2];
    ellipse_half_extent(a, b, c, threshold, extent);
    Ellipse ellipse;
    ellipse.x = A.x, ellipse.y = A.y, ellipse.reach_x = extent[0];
    ellipse.tilt = b / c * extent[0];
    ellipse.slope = b / a;
    ellipse.square = 2.0f * threshold / a;
    ellipse.fall = larger(difference_of_products(a, c, b, b), 0.0f) / (a * a);
    ellipse.view = view;
    int end;
    tiles_between(A.y - extent[1], A.y + extent[1], sizes[2 * view + 1], ellipse.first_row, end);
    ellipse.rows = larger(end - ellipse.first_row, 0);
    return ellipse;
}

// Columns [first, end) of the tiles that an ellipse reaches in a row of tiles.
__device__ inline void span_of_row(const Ellipse& ellipse, int row, const int* sizes, int& first, int& end) {
    const int* size = sizes + 2 * ellipse.view;
    const float top = row * TILE + 0.5f - ellipse.y, bottom = smaller((row + 1) * TILE, size[1]) - 0.5f - ellipse.y;
    // The chord's right end moves outwards up to the rightmost point and inwards behind it; the left end likewise.
    const float right_y = limit(-ellipse.tilt, top, bottom), left_y = limit(ellipse.tilt, top, bottom);
    const float right_square = ellipse.square - ellipse.fall * right_y * right_y;
    const float left_square = ellipse.square - ellipse.fall * left_y * left_y;
    const float right = -ellipse.slope * right_y + sqrt(larger(right_square, 0.0f));
    const float left = -ellipse.slope * left_y - sqrt(larger(left_square, 0.0f));
    const float low = ellipse.x + larger(left, -ellipse.reach_x), high = ellipse.x + smaller(right, ellipse.reach_x);
    tiles_between(low, high, size[0], first, end);
    if (right_square < 0.0f && left_square < 0.0f) end = first;
}

// Goes through the rows of a warp's ellipses, 32 at a time, whoever they belong to: a huge Gaussian keeps no other
// waiting. Calls visit(owner, row, exists, base) with the whole warp: the lane whose ellipse it is, the row of tiles, and
// the number of the first of the 32 rows among those of all ellipses.
template <class Visit> __device__ inline void for_each_row(Ellipse* ellipses, Ellipse mine, Visit visit) {
    const int lane = threadIdx.x % WARP;
    int end = mine.rows;
    for (int step = 1; step < WARP; step *= 2) {
        const int left = __shfl_up_sync(ALL_LANES, end, step);
        if (lane >= step) end += left;
    }
    mine.end = end;
    ellipses[lane] = mine;
    const int total = __shfl_sync(ALL_LANES, end, WARP - 1);
    __syncwarp();
    for (int base = 0; base < total; base += WARP) {
        const int item = base + lane;
        int owner = 0;  // the first lane whose rows end behind this one
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
            if (ellipses[owner + step - 1].end <= item) owner += step;
        const Ellipse& ellipse = ellipses[owner];
        visit(owner, ellipse.first_row + item - (ellipse.end - ellipse.rows), item < total, base);
    }
    __syncwarp();
}

// Adds a block's counts of digits to those of all blocks. Blocks go through many records and call this once: the
// counters are few, and additions to one of them stand in line.
__device__ inline void add_histograms(const unsigned (*counts)[DIGITS], int places, unsigned long long* histograms) {
    __syncthreads();
    for (int place = 0; place < places; ++place)
        if (const unsigned count = counts[place][threadIdx.x])
            atomicAdd(histograms + place * DIGITS + threadIdx.x, static_cast<unsigned long long>(count));
}

// Number of tiles of each record; keys and histograms of the sort by depth. histograms: [4, DIGITS] zero. Any number
// of blocks.
extern "C" __global__ void __launch_bounds__(THREADS)
count_tiles(const float* __restrict__ table,      // [M, RECORD_STRIDE]
            const int* __restrict__ record_view,  // [M]
            const int* __restrict__ sizes,        // [V, 2]
            unsigned* __restrict__ tile_count,  // [M]
            unsigned* __restrict__ keys,        // [M] bits of the depth, ordered as the (positive) depths are
            unsigned* __restrict__ values,      // [M] the record
            unsigned long long* histograms,
            const long long* state) {
    if (step_state(state).halted) return;
    const long long records = step_state(state).records;
    __shared__ Ellipse ellipses[WARPS][WARP];
    __shared__ int tiles[WARPS][WARP];
    __shared__ unsigned counts[4][DIGITS];
    for (int place = 0; place < 4; ++place) counts[place][threadIdx.x] = 0;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    __syncthreads();

    const long long stride = static_cast<long long>(gridDim.x) * THREADS;
    for (long long first = blockIdx.x * THREADS; first < records; first += stride) {
        const long long record = first + threadIdx.x;
        const bool exists = record < records;
        const float* row = table + record * RECORD_STRIDE;
        Ellipse ellipse = {};
        if (exists) ellipse = ellipse_of(row, record_view[record], sizes);
        tiles[warp][lane] = 0;
        for_each_row(ellipses[warp], ellipse, [&](int owner, int tile_row, bool within, int) {
            int begin, end;
            span_of_row(ellipses[warp][owner], tile_row, sizes, begin, end);
            if (within && end > begin) atomicAdd(&tiles[warp][owner], end - begin);
        });
        if (exists) {
            const unsigned key = __float_as_uint(row[DEPTH]);
            tile_count[record] = tiles[warp][lane];
            keys[record] = key;
            values[record] = static_cast<unsigned>(record);
            for (int place = 0; place < 4; ++place) atomicAdd(&counts[place][key >> 8 * place & (DIGITS - 1)], 1u);
        }
    }
    add_histograms(counts, 4, histograms);
}

// Where the pairs of a span of tiles go.
struct __align__(16) Span {
    int before;      // pairs of the spans ahead of it that the warp looks at together
    int tile;        // of its first pair
    unsigned place;  // of its first pair
    unsigned record;
};

// The (tile, record) pairs in the order of depth, and the histograms of the sort by tile, whose number has `places`
// digits of 8 bits, at most 4. Any number of blocks: each takes the next 256 records until there are none.
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
           unsigned long long* lookback,    // [M / THREADS, rounded up] zero
           long long* state) {
    // One thread looks, for all: the block with the last chunk may set it while this one starts.
    __shared__ bool halted;
    if (threadIdx.x == 0) halted = step_state(state).halted != 0;
    __syncthreads();
    if (halted) return;
    const long long records = step_state(state).records;
    __shared__ Ellipse ellipses[WARPS][WARP];
    __shared__ Span spans[WARPS][WARP];
    __shared__ unsigned counts[4][DIGITS];
    // Of 256 records, near to far. Places have 32 bits: the host gives no capacity beyond (MOST_PAIRS in binning.py).
    __shared__ unsigned place_of[THREADS], record_of[THREADS];
    __shared__ unsigned long long before_chunk;
    for (int place = 0; place < places; ++place) counts[place][threadIdx.x] = 0;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    for (;;) {
        // Phase 1: where each record's pairs go.
        const unsigned chunk = ordered_block(counter);
        const long long first = static_cast<long long>(chunk) * THREADS;
        if (first >= records) break;
        const int here = static_cast<int>(smaller(records - first, static_cast<long long>(THREADS)));
        const int position = threadIdx.x;
        record_of[position] = position < here ? by_depth[first + position] : 0;
        unsigned in_chunk;
        const unsigned tiles = position < here ? tile_count[record_of[position]] : 0;
        const unsigned rank = exclusive_sum_in_block<THREADS, unsigned>(tiles, in_chunk);
        if (warp == 0) {
            const uint64 before = exclusive_sum_of_blocks(lookback, chunk, in_chunk);
            if (lane == 0) before_chunk = before;
        }
        __syncthreads();
        const long long total = before_chunk + in_chunk;
        if (threadIdx.x == 0 && first + THREADS >= records) {
            step_state(state).pairs = total;
            if (total > capacity) step_state(state).halted = 1;
        }
        place_of[position] = static_cast<unsigned>(before_chunk) + rank;
        __syncthreads();
        if (total > capacity) continue;

        // Phase 2: the pairs. The nearest records, which tend to be the largest, go to different warps.
        const int own = lane * WARPS + warp;
        Ellipse ellipse = {};
        if (own < here) {
            const long long record = record_of[own];
            ellipse = ellipse_of(table + record * RECORD_STRIDE, record_view[record], sizes);
        }
        for_each_row(ellipses[warp], ellipse, [&](int owner, int row, bool within, int base) {
            int begin, end;
            span_of_row(ellipses[warp][owner], row, sizes, begin, end);
            const int count = within ? larger(end - begin, 0) : 0, of = owner * WARPS + warp;
            int before = count;
            for (int step = 1; step < WARP; step *= 2) {
                const int left = __shfl_up_sync(ALL_LANES, before, step);
                if (lane >= step) before += left;
            }
            const int pairs = __shfl_sync(ALL_LANES, before, WARP - 1);
            before -= count;
            // Spans of one record follow each other, here and from one time to the next.
            const Ellipse& owned = ellipses[warp][owner];
            const int first_lane = larger(owned.end - owned.rows - base, 0);
            const unsigned place = place_of[of] + before - __shfl_sync(ALL_LANES, before, first_lane);
            const int tile = (owned.view * tiles_y + row) * tiles_x + begin;
            spans[warp][lane] = {before, tile, place, record_of[of]};
            __syncwarp();
            if (within && (lane == WARP - 1 || owned.end - base == lane + 1)) place_of[of] = place + count;
            for (int digit = 1; digit < places; ++digit)  // few tiles of a span differ in these
                for (int from = tile, to; from < tile + count; from = to) {
                    to = smaller(tile + count, ((from >> 8 * digit) + 1) << 8 * digit);
                    atomicAdd(&counts[digit][from >> 8 * digit & (DIGITS - 1)], static_cast<unsigned>(to - from));
                }
            for (int pair = lane; pair < pairs; pair += WARP) {
                int span = 0;  // the last one that begins at or ahead of this pair
#pragma unroll
                for (int step = WARP / 2; step > 0; step /= 2)
                    if (spans[warp][span + step].before <= pair) span += step;
                const Span of_pair = spans[warp][span];
                const int in_span = pair - of_pair.before;
                keys[of_pair.place + in_span] = of_pair.tile + in_span;
                values[of_pair.place + in_span] = of_pair.record;
                atomicAdd(&counts[0][(of_pair.tile + in_span) & (DIGITS - 1)], 1u);
            }
            __syncwarp();
        });
        __syncthreads();  // places and records may be written again
    }
    add_histograms(counts, places, histograms);
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
