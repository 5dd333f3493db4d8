// Stage rasterize_backward: from image gradients to one gradient row per record.
//
// Each tile writes one row for every record of its list, at that (record, tile) pair's own place, and a second pass sums
// the pairs of a record in their order: no two threads ever add to the same number, so the sums do not depend on how
// many there are.
#include <algorithm>
#include <memory>

#include "specialise.h"
#include "strip.h"

namespace bytesplat {
namespace {

struct BackwardInput {
    const int64_t* pair;          // [P] number of the pair at each place of the tile lists
    const int64_t* pair_offsets;  // [M + 1]
    const float* rgb;             // [V, H, W, 3], what rasterize returned
    const float* depth;           // [V, H, W]
    const float* transmittance;   // [V, H, W]
    const float* d_rgb;           // [V, H, W, 3]
    const float* d_depth;         // [V, H, W] or null
    const float* d_transmittance;  // [V, H, W] or null
    int statistics;
};

// What upstream asks of the pixels of a strip; zero outside the view.
struct Upstream {
    Floats rgb[TILE][3], depth[TILE];
    Floats rest[TILE];  // R of blend.h: what the records still to come add to the differentiated scalar

    Upstream(const RasterInput& in, const BackwardInput& back, const Strip& strip) : rgb{}, depth{}, rest{} {
        for (int row = 0; row < strip.inside_rows; ++row)
            for (int lane = 0; lane < strip.inside_columns; ++lane) {
                const int64_t pixel = strip.first_pixel + int64_t(row) * in.width + lane;
                float whole = 0.0f;
                for (int channel = 0; channel < 3; ++channel) {
                    rgb[row][channel][lane] = back.d_rgb[3 * pixel + channel];
                    whole += back.d_rgb[3 * pixel + channel] * back.rgb[3 * pixel + channel];
                }
                if (back.d_depth) {
                    depth[row][lane] = back.d_depth[pixel];
                    whole += back.d_depth[pixel] * back.depth[pixel];
                }
                if (back.d_transmittance) whole += back.d_transmittance[pixel] * back.transmittance[pixel];
                rest[row][lane] = whole;
            }
    }
};

template <StopRule STOP, bool INTERVAL, bool D_DEPTH, bool STATISTICS>
void strip_rows(const RasterInput& in, const BackwardInput& back, const std::vector<float>& thresholds,
                const Strip& strip, float* pair_rows) {
    constexpr int WIDTH = STATISTICS ? ROW_WIDTH_WITH_STATISTICS : ROW_WIDTH;
    StripState state(in, strip);
    Upstream upstream(in, back, strip);

    walk(in, thresholds, strip, state, [&](int64_t i, const Splat& splat, uint32_t rows) {
        const float* record = splat.record;
        const float a = record[CONIC], b = record[CONIC + 1], c = record[CONIC + 2];
        const float* colour = record + RGB;

        // Sums over the rows of each lane. p = dL/d(-sigma): all that depends on the mean and the conic is a moment of it.
        Floats p0{}, p1{}, p2{};  // sum p, p dy, p dy^2
        Floats d_rgb[3] = {}, d_depth{}, abs_x{}, abs_y{}, importance{}, largest{};
        for (; rows != 0; rows &= rows - 1) {
            const int row = __builtin_ctz(rows);
            const Floats dy = splat.dy(row);
            const Floats visibility = splat.visibility(dy);
            const Floats before = state.transmittance[row];
            const auto contribution =
                blend_step<STOP>(state.alpha<INTERVAL>(splat, visibility, row), state.transmittance[row]);
            const Floats* g = upstream.rgb[row];
            Floats scalar = g[0] * colour[0] + g[1] * colour[1] + g[2] * colour[2];
            if constexpr (D_DEPTH) scalar += upstream.depth[row] * record[DEPTH];
            const Floats d_alpha = blend_alpha_gradient(contribution, before, scalar, upstream.rest[row]);
            const Floats p = blend_power_gradient(contribution.alpha, splat.opacity, visibility, d_alpha);

            const Floats p_dy = p * dy;
            p0 += p;
            p1 += p_dy;
            p2 += p_dy * dy;
            for (int channel = 0; channel < 3; ++channel) d_rgb[channel] += contribution.weight * g[channel];
            if constexpr (D_DEPTH) d_depth += contribution.weight * upstream.depth[row];
            if constexpr (STATISTICS) {
                abs_x += absolute(p) * absolute(a * splat.dx + b * dy);
                abs_y += absolute(p) * absolute(b * splat.dx + c * dy);
                importance += contribution.weight;
                largest = larger(largest, contribution.weight);
            }
        }

        const Floats p0_dx = p0 * splat.dx;
        Floats columns[TILE] = {a * p0_dx + b * p1,
                                b * p0_dx + c * p1,
                                -0.5f * p0_dx * splat.dx,
                                -p1 * splat.dx,
                                -0.5f * p2,
                                p0 / splat.opacity,
                                d_rgb[0],
                                d_rgb[1],
                                d_rgb[2],
                                d_depth,
                                abs_x,
                                abs_y,
                                importance};
        float* out = pair_rows + WIDTH * back.pair[i];
        for (int first = 0; first < TILE; first += LANES) {
            const Floats sums = lane_sums(columns + first);
            for (int lane = 0; lane < LANES && first + lane < WIDTH; ++lane) out[first + lane] += sums[lane];
        }
        if constexpr (STATISTICS) out[MAX_CONTRIBUTION] = larger(out[MAX_CONTRIBUTION], lane_max(largest));
    });
}

// Sums the rows of each record's pairs.
void sum_pairs(int threads, int64_t records, const int64_t* pair_offsets, const float* pair_rows, int width, float* rows) {
#pragma omp parallel for num_threads(threads)
    for (int64_t record = 0; record < records; ++record) {
        float* row = rows + width * record;
        std::fill_n(row, width, 0.0f);
        for (int64_t pair = pair_offsets[record]; pair < pair_offsets[record + 1]; ++pair) {
            const float* part = pair_rows + width * pair;
            for (int column = 0; column < std::min(width, MAX_CONTRIBUTION); ++column) row[column] += part[column];
            if (width > MAX_CONTRIBUTION) row[MAX_CONTRIBUTION] = larger(row[MAX_CONTRIBUTION], part[MAX_CONTRIBUTION]);
        }
    }
}

template <StopRule STOP, bool INTERVAL, bool D_DEPTH, bool STATISTICS>
void rasterize_backward(int threads, const RasterInput& in, const BackwardInput& back, float* rows) {
    constexpr int WIDTH = STATISTICS ? ROW_WIDTH_WITH_STATISTICS : ROW_WIDTH;
    const std::vector<float> thresholds = in.thresholds(threads);
    const std::unique_ptr<float[]> pair_rows(new float[WIDTH * in.offsets[in.tiles()]]);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t tile = 0; tile < in.tiles(); ++tile) {
        for (int64_t i = in.offsets[tile]; i < in.offsets[tile + 1]; ++i)
            std::fill_n(&pair_rows[WIDTH * back.pair[i]], WIDTH, 0.0f);
        for (int strip = 0; strip < STRIPS; ++strip)
            strip_rows<STOP, INTERVAL, D_DEPTH, STATISTICS>(in, back, thresholds, Strip(in, tile, strip), pair_rows.get());
    }
    sum_pairs(threads, in.record_count, back.pair_offsets, pair_rows.get(), WIDTH, rows);
}

}  // namespace
}  // namespace bytesplat

extern "C" void bytesplat_rasterize_backward(int threads, const bytesplat::RasterInput* in,
                                             const bytesplat::BackwardInput* back, float* rows) {
    using namespace bytesplat;
    specialise(
        [&](auto add, auto interval, auto d_depth, auto statistics) {
            constexpr StopRule STOP = add ? StopRule::add : StopRule::drop;
            rasterize_backward<STOP, interval, d_depth, statistics>(threads, *in, *back, rows);
        },
        StopRule(in->stop) == StopRule::add, in->interval != nullptr, back->d_depth != nullptr, back->statistics != 0);
}
