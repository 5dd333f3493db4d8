// Stage rasterize: blends each tile's list into its pixels, front to back.
#include "specialise.h"
#include "strip.h"

namespace bytesplat {
namespace {

struct Image {
    float* rgb;            // [V, H, W, 3]
    float* depth;          // [V, H, W]
    float* transmittance;  // [V, H, W]
};

template <StopRule STOP, bool INTERVAL>
void rasterize_strip(const RasterInput& in, const std::vector<float>& thresholds, const Strip& strip, const Image& out) {
    StripState state(in, strip);
    Floats sums[TILE][4] = {};  // red, green, blue, depth

    walk(in, thresholds, strip, state, [&](int64_t, const Splat& splat, uint32_t rows) {
        const float* colour = splat.record + RGB;
        const float z = splat.record[DEPTH];
        for (; rows != 0; rows &= rows - 1) {
            const int row = __builtin_ctz(rows);
            const Floats alpha = state.alpha<INTERVAL>(splat, splat.visibility(splat.dy(row)), row);
            const Floats weight = blend_step<STOP>(alpha, state.transmittance[row]).weight;
            Floats* sum = sums[row];
            for (int channel = 0; channel < 3; ++channel) sum[channel] += weight * colour[channel];
            sum[3] += weight * z;
        }
    });

    for (int row = 0; row < strip.rows; ++row) {
        const int64_t first = strip.first_pixel + int64_t(row) * in.width;
        for (int lane = 0; lane < strip.columns; ++lane) {
            for (int channel = 0; channel < 3; ++channel)
                out.rgb[3 * (first + lane) + channel] = sums[row][channel][lane];
            out.depth[first + lane] = sums[row][3][lane];
            out.transmittance[first + lane] = std::fabs(state.transmittance[row][lane]);
        }
    }
}

}  // namespace
}  // namespace bytesplat

extern "C" void bytesplat_rasterize(int threads, const bytesplat::RasterInput* in, float* rgb, float* depth,
                                    float* transmittance) {
    using namespace bytesplat;
    const Image out{rgb, depth, transmittance};
    const std::vector<float> thresholds = in->thresholds(threads);
    specialise(
        [&](auto add, auto interval) {
            constexpr StopRule STOP = add ? StopRule::add : StopRule::drop;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
            for (int64_t i = 0; i < in->tiles() * STRIPS; ++i)
                rasterize_strip<STOP, interval>(*in, thresholds, Strip(*in, i / STRIPS, int(i % STRIPS)), out);
        },
        StopRule(in->stop) == StopRule::add, in->interval != nullptr);
}
