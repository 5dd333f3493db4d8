// The unit of rasterization: a tile, cut into blocks of 4 x (LANES / 4) pixels, each of them one vector. A record is
// evaluated on the blocks that its ellipse reaches and that still have a live pixel.
#pragma once
#include "simd.h"

#include "../common/blend.h"
#include "../common/ellipse.h"

namespace bytesplat {

constexpr int BLOCK_WIDTH = 4, BLOCK_HEIGHT = LANES / BLOCK_WIDTH;  // pixels
constexpr int BLOCKS_X = TILE / BLOCK_WIDTH, BLOCKS = TILE * TILE / LANES;

// Of each block its first pixel in the tile, of each lane its pixel in the block.
struct Grid {
    float block_x[BLOCKS], block_y[BLOCKS], lane_x[LANES], lane_y[LANES];

    constexpr Grid() : block_x{}, block_y{}, lane_x{}, lane_y{} {
        for (int i = 0; i < BLOCKS; ++i) {
            block_x[i] = float(i % BLOCKS_X * BLOCK_WIDTH);
            block_y[i] = float(i / BLOCKS_X * BLOCK_HEIGHT);
        }
        for (int i = 0; i < LANES; ++i) {
            lane_x[i] = float(i % BLOCK_WIDTH);
            lane_y[i] = float(i / BLOCK_WIDTH);
        }
    }
};
constexpr Grid GRID;

// What both directions read. Images have the size of the largest view of the round.
struct RasterInput {
    int views, width, height;
    const int32_t* sizes;    // [V, 2] width, height
    const float* table;      // [M, RECORD_WIDTH]
    int64_t record_count;
    const int64_t* offsets;  // [tiles + 1]
    const int32_t* records;  // [P]
    const float* interval;   // [V, H, W, 2] z_in, z_out, or null
    int stop;                // a StopRule

    int tiles_x() const { return (width + TILE - 1) / TILE; }
    int tiles_y() const { return (height + TILE - 1) / TILE; }
    int64_t tiles() const { return int64_t(views) * tiles_x() * tiles_y(); }

    // The record at a place of the tile lists.
    const float* record(int64_t place) const { return table + int64_t(RECORD_WIDTH) * records[place]; }
};

// Where a tile lies.
struct Tile {
    int64_t index, first_pixel;       // of the tile in [V, tiles_y, tiles_x], of its first pixel in [V, H, W]
    int64_t stride;                   // pixels from row to row
    int x, y;                         // of the first pixel in the view
    int columns, rows;                // pixels that the image has memory for
    int inside_columns, inside_rows;  // pixels of the view

    Tile(const RasterInput& in, int64_t index) : index(index), stride(in.width) {
        const int64_t tiles = in.tiles_x() * in.tiles_y(), view = index / tiles;
        x = int(index % tiles) % in.tiles_x() * TILE;
        y = int(index % tiles) / in.tiles_x() * TILE;
        first_pixel = (view * in.height + y) * stride + x;
        columns = smaller(in.width - x, TILE);
        rows = smaller(in.height - y, TILE);
        inside_columns = clamp(in.sizes[2 * view] - x, 0, columns);
        inside_rows = clamp(in.sizes[2 * view + 1] - y, 0, rows);
    }

    // Calls visit(block, lane, index in [V, H, W]) for the pixels of a rectangle from the first one.
    template <class Visit> void visit_pixels(int columns, int rows, Visit visit) const {
        for (int row = 0; row < rows; ++row)
            for (int column = 0; column < columns; ++column)
                visit(row / BLOCK_HEIGHT * BLOCKS_X + column / BLOCK_WIDTH,
                      row % BLOCK_HEIGHT * BLOCK_WIDTH + column % BLOCK_WIDTH, first_pixel + stride * row + column);
    }
};

// A record seen from a tile. Offsets are from its mean to pixel centres.
struct Splat {
    const float* record;
    float first_dx, first_dy;  // to the tile's first pixel
    Floats half_a, b, half_c, opacity;
    Floats lane_dx, lane_dy;  // to the lanes' pixels, were they in the first block

    Splat(const float* record, const Tile& tile)
        : record(record),
          first_dx(float(tile.x) + 0.5f - record[MEAN2D]),
          first_dy(float(tile.y) + 0.5f - record[MEAN2D + 1]),
          half_a(broadcast<Floats>(0.5f * record[CONIC])),
          b(broadcast<Floats>(record[CONIC + 1])),
          half_c(broadcast<Floats>(0.5f * record[CONIC + 2])),
          opacity(broadcast<Floats>(record[OPACITY])),
          lane_dx(load(GRID.lane_x) + first_dx),
          lane_dy(load(GRID.lane_y) + first_dy) {}

    Floats dx(int block) const { return lane_dx + GRID.block_x[block]; }
    Floats dy(int block) const { return lane_dy + GRID.block_y[block]; }

    Floats visibility(Floats dx, Floats dy) const { return exp_minus(blend_sigma(half_a, b, half_c, dx, dy)); }

    // The blocks that the ellipse { sigma <= threshold } reaches, one bit each.
    uint64_t reached_blocks(float threshold) const {
        const Floats a = half_a + half_a, c = half_c + half_c;
        uint64_t blocks = 0;
        for (int block = 0; block < BLOCKS; block += LANES) {
            const Floats x = load(GRID.block_x + block) + first_dx, y = load(GRID.block_y + block) + first_dy;
            const Floats least = box_sigma(a, b, c, x, x + float(BLOCK_WIDTH - 1), y, y + float(BLOCK_HEIGHT - 1));
            blocks |= uint64_t(bits(least <= threshold)) << block;
        }
        return blocks;
    }
};

// Pixels of a tile at rest, before the first record.
struct TileState {
    Floats transmittance[BLOCKS];        // sign and meaning: blend_step
    Floats z_in[BLOCKS], z_out[BLOCKS];  // depth interval, only set where there is one

    TileState(const RasterInput& in, const Tile& tile) {
        for (Floats& pixels : transmittance) pixels = broadcast<Floats>(-1.0f);
        tile.visit_pixels(tile.inside_columns, tile.inside_rows,
                          [&](int block, int lane, int64_t) { transmittance[block][lane] = 1.0f; });
        if (in.interval == nullptr) return;
        for (int block = 0; block < BLOCKS; ++block) z_in[block] = z_out[block] = Floats{};
        tile.visit_pixels(tile.inside_columns, tile.inside_rows, [&](int block, int lane, int64_t pixel) {
            z_in[block][lane] = in.interval[2 * pixel];
            z_out[block][lane] = in.interval[2 * pixel + 1];
        });
    }

    // Blocks with a live pixel, one bit each.
    uint64_t live_blocks() const {
        uint64_t live = 0;
        for (int block = 0; block < BLOCKS; ++block) live |= uint64_t(bits(transmittance[block] > 0.0f) != 0) << block;
        return live;
    }

    template <bool INTERVAL> Floats alpha(const Splat& splat, Floats visibility, int block) const {
        Floats alpha = blend_alpha(splat.opacity, visibility);
        if constexpr (INTERVAL) {
            const float depth = splat.record[DEPTH];
            alpha = z_in[block] <= depth ? alpha : Floats{};
            alpha = depth < z_out[block] ? alpha : Floats{};
        }
        return alpha;
    }
};

// Calls step(place in the lists, splat, blocks reached and live) for the tile's records, near to far, until all of its
// pixels have stopped. The blocks of a batch of records are found ahead of the steps: the processor then knows early
// how long the loop of each step is.
template <class Step>
inline void walk(const RasterInput& in, const Tile& tile, const TileState& state, Step step) {
    constexpr int BATCH = 16;
    const int64_t last = in.offsets[tile.index + 1];
    for (int64_t first = in.offsets[tile.index]; first < last; first += BATCH) {
        const uint64_t live = state.live_blocks();
        if (live == 0) return;
        const int count = int(smaller(last - first, int64_t(BATCH)));
        float thresholds[BATCH] = {};
        for (int i = 0; i < count; ++i) thresholds[i] = in.record(first + i)[OPACITY] * 255.0f;
        for (int i = 0; i < BATCH; i += LANES) store(log_bound(load(thresholds + i)), thresholds + i);
        uint64_t blocks[BATCH];
        for (int i = 0; i < count; ++i)
            blocks[i] = live & Splat(in.record(first + i), tile).reached_blocks(thresholds[i]);
        for (int i = 0; i < count; ++i)
            if (blocks[i] != 0) step(first + i, Splat(in.record(first + i), tile), blocks[i]);
    }
}

}  // namespace bytesplat
