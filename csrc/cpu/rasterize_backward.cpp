// Stage rasterize_backward: from image gradients to one gradient row per record.
//
// Each tile writes one row for every record of its list, at that (record, tile) pair's own place, and a second pass sums
// the pairs of a record in their order: no two threads ever add to the same number, so the sums do not depend on how
// many there are.
#include <algorithm>
#include <cstring>
#include <memory>

#include "entry.h"
#include "parallel.h"
#include "specialise.h"
#include "tile.h"

namespace bytesplat {
namespace {

struct BackwardInput {
    const int64_t* pair;           // [P] number of the pair at each place of the tile lists
    const int64_t* pair_offsets;   // [M + 1]
    const float* rgb;              // [V, H, W, 3], what rasterize returned
    const float* depth;            // [V, H, W]
    const float* transmittance;    // [V, H, W]
    const float* d_rgb;            // [V, H, W, 3]
    const float* d_depth;          // [V, H, W] or null
    const float* d_transmittance;  // [V, H, W] or null
    int statistics;
};

// What upstream asks of the pixels of a tile; zero outside the view.
struct Upstream {
    Floats rgb[BLOCKS][3], depth[BLOCKS];
    Floats rest[BLOCKS];  // R of blend.h: what the records still to come add to the differentiated scalar

    Upstream(const BackwardInput& back, const Tile& tile) : rgb{}, depth{}, rest{} {
        tile.visit_pixels(tile.inside_columns, tile.inside_rows, [&](int block, int lane, int64_t pixel) {
            float whole = 0.0f;
            for (int channel = 0; channel < 3; ++channel) {
                rgb[block][channel][lane] = back.d_rgb[3 * pixel + channel];
                whole += back.d_rgb[3 * pixel + channel] * back.rgb[3 * pixel + channel];
            }
            if (back.d_depth) {
                depth[block][lane] = back.d_depth[pixel];
                whole += back.d_depth[pixel] * back.depth[pixel];
            }
            if (back.d_transmittance) whole += back.d_transmittance[pixel] * back.transmittance[pixel];
            rest[block][lane] = whole;
        });
    }
};

template <StopRule STOP, bool INTERVAL, bool D_DEPTH, bool STATISTICS>
void tile_rows(const RasterInput& in, const BackwardInput& back, const Tile& tile, float* pair_rows) {
    constexpr int WIDTH = STATISTICS ? ROW_WIDTH_WITH_STATISTICS : ROW_WIDTH;
    TileState state(in, tile);
    Upstream upstream(back, tile);
    for (int64_t i = in.offsets[tile.index]; i < in.offsets[tile.index + 1]; ++i)  // for records without effect
        std::memset(pair_rows + WIDTH * back.pair[i], 0, WIDTH * sizeof(float));

    walk(in, tile, state, [&](int64_t i, const Splat& splat, uint64_t blocks) {
        const float* record = splat.record;
        const float* colour = record + RGB;
        const Floats a = splat.half_a + splat.half_a, b = splat.b, c = splat.half_c + splat.half_c;

        // Sums over the blocks, lane by lane. p = dL/d(-sigma): what depends on mean and conic is a moment of it.
        Floats p_sum{}, p_x{}, p_y{}, p_xx{}, p_xy{}, p_yy{};
        Floats d_rgb[3] = {}, d_depth{}, abs_x{}, abs_y{}, importance{}, largest{};
        for (; blocks != 0; blocks &= blocks - 1) {
            const int block = __builtin_ctzll(blocks);
            const Floats dx = splat.dx(block), dy = splat.dy(block);
            const Floats visibility = splat.visibility(dx, dy);
            const Floats before = state.transmittance[block];
            const auto contribution =
                blend_step<STOP>(state.alpha<INTERVAL>(splat, visibility, block), state.transmittance[block]);
            const Floats* g = upstream.rgb[block];
            Floats scalar = g[0] * colour[0] + g[1] * colour[1] + g[2] * colour[2];
            if constexpr (D_DEPTH) scalar += upstream.depth[block] * record[DEPTH];
            const Floats d_alpha = blend_alpha_gradient(contribution, before, scalar, upstream.rest[block]);
            const Floats p = blend_power_gradient(contribution.alpha, splat.opacity, visibility, d_alpha);

            const Floats p_dx = p * dx, p_dy = p * dy;
            p_sum += p;
            p_x += p_dx;
            p_y += p_dy;
            p_xx += p_dx * dx;
            p_xy += p_dx * dy;
            p_yy += p_dy * dy;
            for (int channel = 0; channel < 3; ++channel) d_rgb[channel] += contribution.weight * g[channel];
            if constexpr (D_DEPTH) d_depth += contribution.weight * upstream.depth[block];
            if constexpr (STATISTICS) {
                abs_x += absolute(a * p_dx + b * p_dy);
                abs_y += absolute(b * p_dx + c * p_dy);
                importance += contribution.weight;
                largest = larger(largest, contribution.weight);
            }
        }

        Floats columns[16] = {a * p_x + b * p_y,
                              b * p_x + c * p_y,
                              -0.5f * p_xx,
                              -p_xy,
                              -0.5f * p_yy,
                              p_sum * (1.0f / record[OPACITY]),
                              d_rgb[0],
                              d_rgb[1],
                              d_rgb[2],
                              d_depth,
                              abs_x,
                              abs_y,
                              importance};
        float* row = pair_rows + WIDTH * back.pair[i];
        for (int first = 0; first < 16; first += LANES) {
            const Floats sums = lane_sums(columns + first);
            for (int lane = 0; lane < LANES && first + lane < WIDTH; ++lane) row[first + lane] = sums[lane];
        }
        if constexpr (STATISTICS) row[MAX_CONTRIBUTION] = lane_max(largest);
    });
}

// The sum of a record's pairs.
template <bool STATISTICS> void sum_pairs(const float* first, const float* last, float* sum) {
    constexpr int WIDTH = STATISTICS ? ROW_WIDTH_WITH_STATISTICS : ROW_WIDTH;
    std::fill_n(sum, WIDTH, 0.0f);
    for (const float* row = first; row < last; row += WIDTH) {
        for (int column = 0; column < (STATISTICS ? MAX_CONTRIBUTION : WIDTH); ++column) sum[column] += row[column];
        if constexpr (STATISTICS) sum[MAX_CONTRIBUTION] = larger(sum[MAX_CONTRIBUTION], row[MAX_CONTRIBUTION]);
    }
}

template <StopRule STOP, bool INTERVAL, bool D_DEPTH, bool STATISTICS>
void rasterize_backward(int threads, const RasterInput& in, const BackwardInput& back, float* rows) {
    constexpr int WIDTH = STATISTICS ? ROW_WIDTH_WITH_STATISTICS : ROW_WIDTH;
    const std::unique_ptr<float[]> pair_rows(new float[WIDTH * in.offsets[in.tiles()]]);
    parallel_for(threads, in.tiles(), 1, [&](int64_t tile) {
        tile_rows<STOP, INTERVAL, D_DEPTH, STATISTICS>(in, back, Tile(in, tile), pair_rows.get());
    });
    parallel_for(threads, in.record_count, 1024, [&](int64_t record) {
        sum_pairs<STATISTICS>(&pair_rows[WIDTH * back.pair_offsets[record]],
                              &pair_rows[WIDTH * back.pair_offsets[record + 1]], rows + WIDTH * record);
    });
}

}  // namespace
}  // namespace bytesplat

extern "C" int64_t bytesplat_rasterize_backward(int threads, const bytesplat::RasterInput* in,
                                                const bytesplat::BackwardInput* back, float* rows) try {
    using namespace bytesplat;
    specialise(
        [&](auto add, auto interval, auto d_depth, auto statistics) {
            constexpr StopRule STOP = add ? StopRule::add : StopRule::drop;
            rasterize_backward<STOP, interval, d_depth, statistics>(threads, *in, *back, rows);
        },
        StopRule(in->stop) == StopRule::add, in->interval != nullptr, back->d_depth != nullptr, back->statistics != 0);
    return 0;
} catch (...) {
    return bytesplat::failure();
}
