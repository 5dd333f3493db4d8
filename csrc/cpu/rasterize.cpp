// Stage rasterize: blends each tile's list into its pixels, front to back.
#include "entry.h"
#include "parallel.h"
#include "specialise.h"
#include "tile.h"

namespace bytesplat {
namespace {

struct Image {
    float* rgb;            // [V, H, W, 3]
    float* depth;          // [V, H, W]
    float* transmittance;  // [V, H, W]
};

template <StopRule STOP, bool INTERVAL>
void rasterize_tile(const RasterInput& in, const Tile& tile, const Image& out) {
    TileState state(in, tile);
    Floats sums[BLOCKS][4] = {};  // red, green, blue, depth

    walk(in, tile, state, [&](int64_t, const Splat& splat, uint64_t blocks) {
        const float* colour = splat.record + RGB;
        const float z = splat.record[DEPTH];
        for (; blocks != 0; blocks &= blocks - 1) {
            const int block = __builtin_ctzll(blocks);
            const Floats visibility = splat.visibility(splat.dx(block), splat.dy(block));
            const Floats alpha = state.alpha<INTERVAL>(splat, visibility, block);
            const Floats weight = blend_step<STOP>(alpha, state.transmittance[block]).weight;
            Floats* sum = sums[block];
            for (int channel = 0; channel < 3; ++channel) sum[channel] += weight * colour[channel];
            sum[3] += weight * z;
        }
    });

    tile.visit_pixels(tile.columns, tile.rows, [&](int block, int lane, int64_t pixel) {
        for (int channel = 0; channel < 3; ++channel) out.rgb[3 * pixel + channel] = sums[block][channel][lane];
        out.depth[pixel] = sums[block][3][lane];
        out.transmittance[pixel] = std::fabs(state.transmittance[block][lane]);
    });
}

}  // namespace
}  // namespace bytesplat

extern "C" int64_t bytesplat_rasterize(int threads, const bytesplat::RasterInput* in, float* rgb, float* depth,
                                       float* transmittance) try {
    using namespace bytesplat;
    const Image out{rgb, depth, transmittance};
    specialise(
        [&](auto add, auto interval) {
            constexpr StopRule STOP = add ? StopRule::add : StopRule::drop;
            parallel_for(threads, in->tiles(), 1,
                         [&](int64_t tile) { rasterize_tile<STOP, interval>(*in, Tile(*in, tile), out); });
        },
        StopRule(in->stop) == StopRule::add, in->interval != nullptr);
    return 0;
} catch (...) {
    return bytesplat::failure();
}
