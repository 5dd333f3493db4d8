// Rasterization, photometric loss and the derivative of both in one launch: a block takes a tile from its list of
// records to gradient rows, and each of its four warps keeps the records of its 8 x 8 pixels in shared memory.
//
// A gradient needs the windows around a pixel, and these need the colours around them, so a tile depends on its eight
// neighbours, twice:
//   1. blend (as rasterize.cu does), write colours; wait until the neighbours' colours are there;
//   2. the windows centred on the tile's pixels, write their derivatives (ssim.h); wait for the neighbours' ones;
//   3. the pixels' gradients, which stay in registers;
//   4. gradient rows from the records that were kept; of longer lists, the rest is read again (as
//      rasterize_backward.cu does).
// Colours and derivatives pass from block to block through memory, in practice through L2: they are read soon after
// they are written. Nothing else is written for another phase: not the image's gradient, nor what became of the lists.
//
// Why it cannot deadlock: tiles are taken by the blocks that run, in one order, down the shorter side of the image:
// `along` tiles a line. A tile's last neighbour is along + 1 tiles later, and what that one waits for in phase 2
// another along + 1, so the first tile that is not done waits for nothing behind the next 2 along + 2. All of these are
// taken by then if 2 along + 3 blocks run at a time, and taking a tile means blending it without waiting. Who launches
// this kernel sees to it that a GPU runs twice as many, in case other kernels hold a part of it
// (ops/cuda/fused_raster.py).
//
// README.md beside this file has what was counted and predicted, what was measured, and the work items that were tried.
//
// Compile-time: STOP_ADD, STATISTICS, SPLIT (backward.h), UNROLL, TARGET_CHANNELS, TARGET_BYTES, MASKED (photo.h),
// BLOCKS (that a multiprocessor should hold), SLOTS (records that a warp has room for), COUNT_READS (0, 1).
#define DEPTHS 0
#define INTERVAL 0
#define DEPTH_GRADIENT 0
#define COMPACT 1
#include "backward.h"
#include "photo.h"
#include "step.h"

using namespace bytesplat;

constexpr int THREADS = QUARTERS * WARP;
constexpr int KEPT = SLOTS - (GROUP - 1);    // at most; the last group may be filled up
constexpr int STREAM = WARP + UNROLL;        // slots at the end that hold passing records of a list too long to keep
constexpr int LINES = TILE + 2 * MARGIN;     // of a tile and what its windows reach
constexpr int PLANES = 15;                   // of each view: 3 of colours, 3 of the photo, 3 x 3 of derivatives
constexpr int GAP = PART;                    // floats between lines of a plane
constexpr int PLANE_SLACK = 32;              // floats behind a plane
constexpr int SUMS = 32;                     // copies of a view's sums, so that tiles seldom add to the same one
constexpr unsigned BLENDED = 1, TERMS = 2;   // how far a tile is

struct Shared {
    Queue<SLOTS> queues[QUARTERS];
    union {
        Reduction reductions[QUARTERS];
        float4 filtered[2][LINES][TILE];  // along lines, of a channel: two, so that one may still be read
    };
    float sums[QUARTERS][2];
    unsigned ticket;
};

// A tile of the round and the planes of its view. Between the lines of a plane there are GAP zeros, so that windows may
// reach beyond the view's tiles on both sides; what they reach starts at a multiple of four floats.
struct Tile {
    int column, row, columns, rows;
    float* planes;

    __device__ int pitch() const { return columns * TILE + GAP; }
    __device__ int plane_size() const { return pitch() * rows * TILE + PLANE_SLACK; }
    // Where a plane has a pixel, from `planes` on.
    __device__ int at(int plane, int x, int y) const {
        return plane * plane_size() + y * pitch() + x + GAP + MARGIN;
    }
    // Writes a pixel and, beside the outermost ones, a zero.
    __device__ void write(int plane, int x, int y, float value) const {
        float* pixel = planes + at(plane, x, y);
        int beside = x < GAP ? -GAP : x >= columns * TILE - GAP ? GAP : 0;
        forget(beside);  // or the compiler makes loops of their own for the outermost tiles
        *pixel = value;
        if (beside != 0) pixel[beside] = 0.0f;
    }
};

// 14 neighbours in a line of a plane from x on (which with MARGIN is a multiple of four).
__device__ inline void read_plane(const Tile& tile, int plane, int x, int y, float values[INPUTS]) {
    const float4* source = reinterpret_cast<const float4*>(tile.planes + tile.at(plane, x, y));
#pragma unroll
    for (int v = 0; v < INPUTS; v += 4) {
        const float4 four = source[v / 4];
        values[v] = four.x, values[v + 1] = four.y;
        if (v + 2 < INPUTS) values[v + 2] = four.z, values[v + 3] = four.w;
    }
}

// Filters a channel along lines, four outputs a thread. Of the colours: ours, the photo's, the sum of their squares and
// their product (ssim.h asks for no more); of the derivatives, the three of them. All threads of the block call it.
__device__ inline void filter_lines(const Tile& tile, int channel, bool colours, float4 (*filtered)[TILE]) {
    constexpr int RUNS = TILE / RUN;
    const int line = threadIdx.x / RUNS, first = threadIdx.x % RUNS * RUN;
    if (line >= LINES) return;
    const int x = tile.column * TILE + first - MARGIN, y = tile.row * TILE + line - MARGIN;
    float2* out = reinterpret_cast<float2*>(&filtered[line][first]);
    const auto put = [&](int half, const float4& a, const float4& b) {
        out[half] = make_float2(a.x, b.x), out[2 + half] = make_float2(a.y, b.y);
        out[4 + half] = make_float2(a.z, b.z), out[6 + half] = make_float2(a.w, b.w);
    };
    const float4 nothing = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float values[INPUTS], others[INPUTS];
    if (y < 0 || y >= tile.rows * TILE) {
        put(0, nothing, nothing), put(1, nothing, nothing);
    } else if (colours) {
        read_plane(tile, channel, x, y, values);
        read_plane(tile, 3 + channel, x, y, others);
        put(0, filter(values), filter(others));
#pragma unroll
        for (int k = 0; k < INPUTS; ++k) {
            const float product = values[k] * others[k];
            values[k] = fmaf(values[k], values[k], others[k] * others[k]), others[k] = product;
        }
        put(1, filter(values), filter(others));
    } else {
        read_plane(tile, 6 + 3 * channel, x, y, values);
        read_plane(tile, 7 + 3 * channel, x, y, others);
        put(0, filter(values), filter(others));
        read_plane(tile, 8 + 3 * channel, x, y, values);
        put(1, filter(values), nothing);
    }
}

// The filters down the columns of the lane's two pixels.
__device__ inline void filter_columns(const float4 (*filtered)[TILE], float4 out[PIXELS]) {
    const int warp = threadIdx.x / WARP, lane = lane_index();
    const int column = warp % 2 * PART + lane % PART, row = warp / 2 * PART + lane / PART;
    out[0] = out[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < SSIM_TAPS + ROW_STEP; ++k) {
        const float4 value = filtered[row + k][column];
#pragma unroll
        for (int q = 0; q < PIXELS; ++q) {
            const int tap = k - ROW_STEP * q;
            if (tap < 0 || tap >= SSIM_TAPS) continue;
            const float weight = ssim_weight(tap);
            out[q].x = fmaf(weight, value.x, out[q].x), out[q].y = fmaf(weight, value.y, out[q].y);
            out[q].z = fmaf(weight, value.z, out[q].z), out[q].w = fmaf(weight, value.w, out[q].w);
        }
    }
}

// Says how far the tile is, after all that the block has written.
__device__ inline void publish(const Tile& tile, unsigned* progress, unsigned reached) {
    __syncthreads();
    if (threadIdx.x > 0) return;
    fence();
    store_flag(progress + tile.row * tile.columns + tile.column, reached);
}

// Waits until the eight neighbours are as far, too. What they wrote can be read then.
__device__ inline void wait_for_neighbours(const Tile& tile, const unsigned* progress, unsigned reached) {
    if (threadIdx.x < WARP) {
        const int lane = threadIdx.x, column = tile.column + lane % 3 - 1, row = tile.row + lane / 3 - 1;
        const bool exists = lane < 9 && column >= 0 && row >= 0 && column < tile.columns && row < tile.rows;
        while (true) {
            const bool there = !exists || load_flag(progress + row * tile.columns + column) >= reached;
            if (__all_sync(ALL_LANES, there)) break;
            pause();
        }
        fence();
    }
    __syncthreads();
}

__device__ inline float sum_of_warp(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}
__device__ inline double sum_of_warp(double value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
rasterize_photometric(const float* __restrict__ table,           // [M, RECORD_STRIDE]
                      const int* __restrict__ records,           // [P] tile lists
                      const long long* __restrict__ offsets,     // [tiles + 1]
                      const int* __restrict__ sizes,             // [V, 2] width, height
                      int width, int height,                     // of the stored images
                      int tiles_x, int tiles_y,
                      const unsigned char* __restrict__ target,  // [V, H, W, TARGET_CHANNELS], bytes or floats
                      const unsigned char* __restrict__ mask,    // [V, H, W], if MASKED
                      const float* __restrict__ background,      // [V, 3]
                      float lambda,
                      const unsigned long long* __restrict__ counts,  // [V, 2], if MASKED
                      float* __restrict__ rgb,                        // [V, H, W, 3]
                      float* __restrict__ transmittance,              // [V, H, W]
                      float* planes,                      // [V, PLANES, lines of the tiles + PLANE_SLACK]
                      unsigned* progress,                 // [V, tiles] zero
                      unsigned* tickets,                  // [1 + V] zero: tiles taken, and done of each view
                      double* sums,                       // [V, SUMS, 2] zero
                      float* __restrict__ values,         // [V]
                      float* __restrict__ gradient_rows,  // [M, ROW] zero
                      int* __restrict__ reads,  // [V, tiles, QUARTERS, 3], if COUNT_READS: queued, kept, used again
                      const long long* state) {
    if (step_state(state).halted) return;
    __shared__ Shared shared;

    // The tile: down the shorter side.
    int lane = lane_index(), warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) shared.ticket = atomicAdd(tickets, 1u);
    __syncthreads();
    Tile tile = {0, 0, tiles_x, tiles_y, planes};
    const unsigned tiles = tile.columns * tile.rows;
    const int index = shared.ticket / tiles, place = shared.ticket % tiles;  // view and place in it
    if (tile.rows < tile.columns) tile.column = place / tile.rows, tile.row = place % tile.rows;
    else tile.row = place / tile.columns, tile.column = place % tile.columns;
    tile.planes += static_cast<long long>(index) * PLANES * tile.plane_size();
    progress += index * tiles;
    Region region = region_of(index, tile.column, tile.row, warp, lane, tiles_x, tiles_y);
    const View view = {sizes[2 * index], sizes[2 * index + 1], width,
                       static_cast<long long>(index) * height * width, rgb, transmittance, target, mask,
                       background + 3 * index};

    // Phase 1: blend. Records stay in the queue while they fit; `kept` of them do, and `resume` is where those that do
    // not begin.
    Queue<SLOTS>& queue = shared.queues[warp];
    Blended pixels(region, view.width, view.height);
    unsigned next = static_cast<unsigned>(offsets[region.tile]);
    const unsigned end = static_cast<unsigned>(offsets[region.tile + 1]);
    unsigned resume = end, marked = next;  // `mark` records precede place `marked` and leave STREAM slots behind them
    int length = 0, head = 0, mark = 0, queued = 0;
    bool keeping = true;
    Fetched fetched = fetch_record(table, fetch_index(records, next, end));
    while (next < end && pixels.live()) {
        const Selected selected = select(fetched, region.centre_x, region.centre_y);
        if (keeping && length + __popc(selected.hits) > KEPT) {
            if (lane < UNROLL) queue.put(length + lane, faint_record());
            __syncwarp();
            if (head < length) pixels.blend(queue, head, region);
            __syncwarp();
            keeping = false, resume = marked;
        }
        if (!keeping) length = head = SLOTS - STREAM;
        length = append(queue, length, selected);
        if (COUNT_READS) queued += __popc(selected.hits);
        next += WARP;
        fetched = fetch_record(table, fetch_index(records, next, end));  // on their way while these are blended
        const bool all = !keeping || next >= end;
        if (all && lane < UNROLL) queue.put(length + lane, faint_record());  // to fill the last group
        __syncwarp();
        for (; head + UNROLL <= length || (all && head < length); head += UNROLL) pixels.blend(queue, head, region);
        if (keeping && length <= SLOTS - STREAM) mark = length, marked = next;
        __syncwarp();
    }
    const int kept = keeping ? length : mark;

    float difference = 0.0f, similarity = 0.0f;
#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        const int x = region.x, y = region.y + ROW_STEP * q;
        const bool counts_here = view.inside(x, y) && view.keeps(x, y);
        const float colour[3] = {pixels.r[q], pixels.g[q], pixels.b[q]};
        if (x < width && y < height) {
            for (int c = 0; c < 3; ++c) rgb[3 * view.pixel(x, y) + c] = colour[c];
            transmittance[view.pixel(x, y)] = pixels.final[q];
        }
#pragma unroll
        for (int c = 0; c < 3; ++c) {  // masked pixels and what is outside as zero
            const float composed = fmaf(pixels.final[q], view.background[c], colour[c]);
            const float ours = counts_here ? __saturatef(composed) : 0.0f;
            const float wanted = counts_here ? view.photo(x, y, c) : 0.0f;
            tile.write(c, x, y, ours), tile.write(3 + c, x, y, wanted);
            difference += fabsf(ours - wanted);
        }
    }
    publish(tile, progress, BLENDED);

    // Phases 2 and 3, channel by channel: the windows around the pixels, then, from their derivatives, the pixels'
    // gradients. One text for both, and no loop unrolled: warps in different phases share the cache of instructions.
    float of_pixels, of_windows, red[PIXELS] = {}, green[PIXELS] = {}, blue[PIXELS] = {};
    read_counts(view, index, counts, of_pixels, of_windows);
    const float l1_scale = l1_scale_of(of_pixels, lambda), ssim_scale = ssim_scale_of(of_windows, lambda);
#pragma unroll 1
    for (unsigned reached = BLENDED; reached <= TERMS; ++reached) {
        const bool colours = reached == BLENDED;
        wait_for_neighbours(tile, progress, reached);
#pragma unroll 1
        for (int c = 0; c < 3; ++c) {
            float4 filtered[PIXELS];
            filter_lines(tile, c, colours, shared.filtered[(c + reached) % 2]);
            __syncthreads();
            filter_columns(shared.filtered[(c + reached) % 2], filtered);
#pragma unroll
            for (int q = 0; q < PIXELS; ++q) {
                const int x = region.x, y = region.y + ROW_STEP * q;
                const float4 of = filtered[q];
                if (colours) {
                    Ssim<float> window = {0.0f, 0.0f, 0.0f, 0.0f};
                    if (view.has_window(x, y)) window = ssim(of.x, of.y, of.z, 0.0f, of.w);
                    similarity += window.value;
                    tile.write(6 + 3 * c, x, y, window.d_mean);
                    tile.write(7 + 3 * c, x, y, window.d_square);
                    tile.write(8 + 3 * c, x, y, window.d_product);
                } else if (view.inside(x, y) && view.keeps(x, y)) {
                    const float colour = c == 0 ? pixels.r[q] : c == 1 ? pixels.g[q] : pixels.b[q];
                    const float ours = fmaf(pixels.final[q], view.background[c], colour);
                    const float wanted = tile.planes[tile.at(3 + c, x, y)];
                    const float gradient =
                        photometric_gradient_at(ours, wanted, of.x, of.y, of.z, l1_scale, ssim_scale);
                    red[q] = c == 0 ? gradient : red[q];
                    green[q] = c == 1 ? gradient : green[q];
                    blue[q] = gradient;
                }
            }
        }
        if (!colours) continue;
        difference = sum_of_warp(difference), similarity = sum_of_warp(similarity);
        if (lane == 0) shared.sums[warp][0] = difference, shared.sums[warp][1] = similarity;
        publish(tile, progress, TERMS);
        if (warp > 0) continue;
        double* total = sums + 2 * SUMS * index;
        unsigned done = 0;
        if (lane == 0) {
            for (int i = 0; i < 2; ++i)
                atomicAdd(total + 2 * (place % SUMS) + i, static_cast<double>(shared.sums[0][i]) + shared.sums[1][i] +
                                                        shared.sums[2][i] + shared.sums[3][i]);
            fence();
            done = atomicAdd(tickets + 1 + index, 1u) + 1;
        }
        if (__shfl_sync(ALL_LANES, done, 0) == tiles) {  // the view's last tile
            fence();
            const double differences = sum_of_warp(atomicAdd(total + 2 * lane, 0.0));
            const double similarities = sum_of_warp(atomicAdd(total + 2 * lane + 1, 0.0));
            values[index] = photometric_value(differences, similarities, of_pixels, of_windows, lambda);
        }
    }

    // Phase 4: gradient rows.
    __syncthreads();  // what was filtered makes room
    forget(tile.column), forget(tile.row), forget(lane), forget(warp);
    region = region_of(index, tile.column, tile.row, warp, lane, tiles_x, tiles_y);
    PixelGradients derived = {};
#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        if (!view.inside(region.x, region.y + ROW_STEP * q)) continue;
        const float through =
            fmaf(red[q], view.background[0], fmaf(green[q], view.background[1], blue[q] * view.background[2]));
        derived.set(q, pixels.r[q], pixels.g[q], pixels.b[q], pixels.final[q], red[q], green[q], blue[q], through);
    }
    int used = 0;
    if (kept > 0 || resume < end)
        used = add_to_rows(shared.reductions[warp], queue, kept, region, derived, table, records, resume, end,
                           gradient_rows);
    if (COUNT_READS && lane == 0) {
        int* counted = reads + 3 * (QUARTERS * (index * tiles + place) + warp);
        counted[0] = queued, counted[1] = kept, counted[2] = used;
    }
}
