// Stage bin: for each tile the records that reach it, near to far.
//
// Records are sorted by depth once, by counting sorts of the depth's bits (positive floats order like their bits). The
// (record, tile) pairs in that order then need only one more stable counting sort, by tile.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "../common/ellipse.h"
#include "entry.h"
#include "parallel.h"

namespace bytesplat {
namespace {

constexpr int64_t GRAIN = 256;             // records of which a thread finds the tiles in a row
constexpr int64_t WORTH_A_THREAD = 65536;  // items to sort; below, waking threads costs more than it saves

struct BinInput {
    int width, height;     // of the largest view
    const int32_t* sizes;  // [V, 2] width, height
    const float* table;    // [M, RECORD_WIDTH]
    const int32_t* view;   // [M]
    const int64_t* ids;    // [M]
    int64_t record_count;

    int tiles_x() const { return (width + TILE - 1) / TILE; }
    int tiles_y() const { return (height + TILE - 1) / TILE; }
};

// Calls visit(tile) for every tile that a record's ellipse reaches, in row-major order. A tile counts as the rectangle
// spanned by its pixel centres inside the view.
template <class Visit> inline void visit_tiles(const BinInput& in, int64_t index, Visit visit) {
    const float* record = in.table + RECORD_WIDTH * index;
    const float x = record[MEAN2D], y = record[MEAN2D + 1];
    const float a = record[CONIC], b = record[CONIC + 1], c = record[CONIC + 2];
    const float threshold = ellipse_threshold(record[OPACITY]);
    const int view = in.view[index], width = in.sizes[2 * view], height = in.sizes[2 * view + 1];
    float extent[2];
    ellipse_half_extent(a, b, c, threshold, extent);

    const auto tile_of = [](float pixel, int size) { return int(clamp(pixel, 0.0f, float(size - 1))) / TILE; };
    const int first_x = tile_of(x - extent[0], width), last_x = tile_of(x + extent[0], width);
    const int first_y = tile_of(y - extent[1], height), last_y = tile_of(y + extent[1], height);
    for (int tile_y = first_y; tile_y <= last_y; ++tile_y) {
        const float y0 = float(tile_y * TILE) + 0.5f - y;
        const float y1 = float(std::min(tile_y * TILE + TILE, height)) - 0.5f - y;
        for (int tile_x = first_x; tile_x <= last_x; ++tile_x) {
            const float x0 = float(tile_x * TILE) + 0.5f - x;
            const float x1 = float(std::min(tile_x * TILE + TILE, width)) - 0.5f - x;
            if (box_sigma(a, b, c, x0, x1, y0, y1) <= threshold)
                visit(int32_t((view * in.tiles_y() + tile_y) * in.tiles_x() + tile_x));
        }
    }
}

// One stable counting sort: `out` receives the items of `in` by ascending key(item). Returns the first place of each
// bucket, and behind them `count`. Each thread takes a contiguous part of the items, so the result is that of one.
template <class Index, class Key>
std::vector<int64_t> counting_sort(int threads, int64_t count, int64_t buckets, const Index* in, Index* out, Key key) {
    const int parts = int(std::min(int64_t(threads), 1 + count / WORTH_A_THREAD));
    const auto part_begin = [=](int64_t part) { return count * part / parts; };
    std::vector<int64_t> places(parts * buckets);
    parallel_for(parts, parts, 1, [&](int64_t part) {
        for (int64_t i = part_begin(part); i < part_begin(part + 1); ++i) ++places[part * buckets + key(in[i])];
    });

    std::vector<int64_t> firsts(buckets + 1);
    int64_t place = 0;
    for (int64_t bucket = 0; bucket < buckets; ++bucket) {
        firsts[bucket] = place;
        for (int part = 0; part < parts; ++part) {
            const int64_t size = places[part * buckets + bucket];
            places[part * buckets + bucket] = place;
            place += size;
        }
    }
    firsts[buckets] = place;

    parallel_for(parts, parts, 1, [&](int64_t part) {
        for (int64_t i = part_begin(part); i < part_begin(part + 1); ++i)
            out[places[part * buckets + key(in[i])]++] = in[i];
    });
    return firsts;
}

// The records of all views, near to far, equal depths by global id.
std::vector<int32_t> depth_order(int threads, const BinInput& in) {
    constexpr int DIGIT = 11;
    const int64_t count = in.record_count;
    std::vector<uint32_t> depth(count);
    for (int64_t i = 0; i < count; ++i) std::memcpy(&depth[i], in.table + RECORD_WIDTH * i + DEPTH, sizeof(float));
    std::vector<int32_t> order(count), next(count);
    std::iota(order.begin(), order.end(), 0);
    for (int shift = 0; shift < 32; shift += DIGIT) {
        counting_sort(threads, count, 1 << DIGIT, order.data(), next.data(),
                      [&](int32_t record) { return depth[record] >> shift & ((1 << DIGIT) - 1); });
        order.swap(next);
    }
    for (int64_t first = 0; first < count;) {
        int64_t last = first + 1;
        while (last < count && depth[order[last]] == depth[order[first]]) ++last;
        if (last - first > 1)
            std::sort(&order[first], &order[first] + (last - first),
                      [&](int32_t left, int32_t right) { return in.ids[left] < in.ids[right]; });
        first = last;
    }
    return order;
}

}  // namespace
}  // namespace bytesplat

using namespace bytesplat;

// Fills pair_offsets [M + 1]: the pairs of record m are numbered pair_offsets[m] to pair_offsets[m + 1].
extern "C" int64_t bytesplat_bin_count(int threads, const BinInput* in, int64_t* pair_offsets) try {
    pair_offsets[0] = 0;
    parallel_for(threads, in->record_count, GRAIN, [&](int64_t record) {
        int64_t reached = 0;
        visit_tiles(*in, record, [&](int32_t) { ++reached; });
        pair_offsets[record + 1] = reached;
    });
    std::partial_sum(pair_offsets, pair_offsets + in->record_count + 1, pair_offsets);
    return 0;
} catch (...) {
    return bytesplat::failure();
}

// Fills offsets [tiles + 1], records [P] and pair [P] of the tile lists; `tiles` counts those of all views.
extern "C" int64_t bytesplat_bin_fill(int threads, const BinInput* in, const int64_t* pair_offsets, int64_t tiles,
                                      int64_t* offsets, int32_t* records, int64_t* pair) try {
    const int64_t count = in->record_count, pairs = pair_offsets[count];
    const std::unique_ptr<int32_t[]> tile_of(new int32_t[pairs]), record_of(new int32_t[pairs]);
    parallel_for(threads, count, GRAIN, [&](int64_t record) {
        int64_t number = pair_offsets[record];
        visit_tiles(*in, record, [&](int32_t tile) {
            record_of[number] = int32_t(record);
            tile_of[number++] = tile;
        });
    });

    const std::unique_ptr<int64_t[]> by_depth(new int64_t[pairs]);
    int64_t place = 0;
    for (const int32_t record : depth_order(threads, *in))
        for (int64_t number = pair_offsets[record]; number < pair_offsets[record + 1]; ++number)
            by_depth[place++] = number;

    const std::vector<int64_t> firsts =
        counting_sort(threads, pairs, tiles, by_depth.get(), pair, [&](int64_t number) { return tile_of[number]; });
    std::copy(firsts.begin(), firsts.end(), offsets);
    parallel_for(threads, pairs, WORTH_A_THREAD, [&](int64_t i) { records[i] = record_of[pair[i]]; });
    return 0;
} catch (...) {
    return bytesplat::failure();
}
