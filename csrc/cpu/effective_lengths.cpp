// Stage effective_lengths: how far down each tile's list something is still seen.
#include "entry.h"
#include "parallel.h"
#include "specialise.h"
#include "tile.h"

namespace bytesplat {
namespace {

template <StopRule STOP> int effective_length(const RasterInput& in, const Tile& tile) {
    TileState state(in, tile);
    int64_t last = in.offsets[tile.index] - 1;
    walk(in, tile, state, [&](int64_t place, const Splat& splat, uint64_t blocks) {
        for (; blocks != 0; blocks &= blocks - 1) {
            const int block = __builtin_ctzll(blocks);
            const Floats visibility = splat.visibility(splat.dx(block), splat.dy(block));
            const Floats alpha = state.alpha<false>(splat, visibility, block);
            if (bits(blend_step<STOP>(alpha, state.transmittance[block]).weight > Floats{})) last = place;
        }
    });
    return int(last + 1 - in.offsets[tile.index]);
}

}  // namespace
}  // namespace bytesplat

extern "C" int64_t bytesplat_effective_lengths(int threads, const bytesplat::RasterInput* in, int32_t* lengths) try {
    using namespace bytesplat;
    specialise(
        [&](auto add) {
            constexpr StopRule STOP = add ? StopRule::add : StopRule::drop;
            parallel_for(threads, in->tiles(), 1,
                         [&](int64_t tile) { lengths[tile] = effective_length<STOP>(*in, Tile(*in, tile)); });
        },
        StopRule(in->stop) == StopRule::add);
    return 0;
} catch (...) {
    return bytesplat::failure();
}
