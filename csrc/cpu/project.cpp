// Stage project: a record for every (view, Gaussian) pair that can reach a pixel.
#include <algorithm>
#include <vector>

#include "entry.h"
#include "gaussians.h"
#include "parallel.h"

namespace bytesplat {
namespace {

struct RecordOutput {
    float* table;       // [V N, RECORD_WIDTH]: room for every pair
    int32_t* gaussian;  // [V N]
    int32_t* view;      // [V N]
    float* radius;      // [V N]
    int64_t* ids;       // [V N]

    void move(int64_t from, int64_t count, int64_t to) const {
        const auto rows = [=](auto* column, int64_t width) {
            std::copy(column + width * from, column + width * (from + count), column + width * to);
        };
        rows(table, RECORD_WIDTH), rows(gaussian, 1), rows(view, 1), rows(radius, 1), rows(ids, 1);
    }
};

// Colour of a Gaussian, given the spherical harmonics in its direction; false when it is not finite.
bool colour(const ProjectInput& in, int64_t i, const Floats basis[SH_FUNCTIONS_MAX], int lane, float rgb[3]) {
    const float* rest = in.rest(i);
    for (int c = 0; c < 3; ++c) rgb[c] = 0.5f + basis[0][lane] * in.features_dc[3 * i + c];
    for (int k = 1; k < in.functions(); ++k)
        for (int c = 0; c < 3; ++c) rgb[c] += basis[k][lane] * rest[3 * (k - 1) + c];
    const bool finite = is_finite(rgb[0] + rgb[1] + rgb[2]);
    for (int c = 0; c < 3; ++c) rgb[c] = larger(rgb[c], 0.0f);
    return finite;
}

// Writes the records of Gaussians [first, last), at most LANES of them, from row `row` on. Returns the row behind them.
int64_t project_lanes(const ProjectInput& in, const Camera<float>& camera, int view, int64_t first, int64_t last,
                      const RecordOutput& out, int64_t row) {
    const Camera<Floats> cameras = spread(camera);
    const Shape<Floats> shapes = in.shapes([=](int lane) { return std::min(first + lane, last - 1); });
    const Projection<Floats> projections =
        project_shape(shapes, cameras, broadcast<Floats>(in.dilation), in.antialiased != 0);
    Floats centre[3], direction[3], basis[SH_FUNCTIONS_MAX];
    camera_centre(cameras, centre);
    view_direction(shapes.mean, centre, direction);
    sh_basis(in.sh_degree, direction[0], direction[1], direction[2], basis);

    for (int64_t i = first; i < last; ++i) {
        const int lane = int(i - first);
        const Projection<float> p = get_lane(projections, lane);
        float* record = out.table + RECORD_WIDTH * row;
        if (!projection_visible(p, camera, in.near_plane, in.far_plane)) continue;
        if (!colour(in, i, basis, lane, record + RGB)) continue;
        std::copy_n(p.mean2d, 2, record + MEAN2D);
        std::copy_n(p.conic, 3, record + CONIC);
        record[OPACITY] = p.opacity;
        record[DEPTH] = p.mean[2];
        out.gaussian[row] = int32_t(i);
        out.view[row] = view;
        out.radius[row] = p.radius;
        out.ids[row] = in.ids[i];
        ++row;
    }
    return row;
}

}  // namespace
}  // namespace bytesplat

using namespace bytesplat;

// Returns the number of records M; the outputs' first M rows are filled.
extern "C" int64_t bytesplat_project(int threads, const ProjectInput* in, const RecordOutput* out) try {
    constexpr int64_t BLOCK = 1024;  // Gaussians; each block writes its records where its own pairs have room
    const int64_t blocks = (in->count + BLOCK - 1) / BLOCK;
    std::vector<int64_t> records(in->views * blocks);
    parallel_for(threads, in->views * blocks, 1, [&](int64_t block) {
        const int view = int(block / blocks);
        const Camera<float> camera = in->camera(view);
        const int64_t first = block % blocks * BLOCK, last = std::min(first + BLOCK, in->count);
        int64_t row = view * in->count + first;
        for (int64_t i = first; i < last; i += LANES)
            row = project_lanes(*in, camera, view, i, std::min(i + LANES, last), *out, row);
        records[block] = row - (view * in->count + first);
    });

    int64_t total = 0;
    for (int64_t block = 0; block < in->views * blocks; ++block) {  // close the gaps
        out->move(block / blocks * in->count + block % blocks * BLOCK, records[block], total);
        total += records[block];
    }
    return total;
} catch (...) {
    return bytesplat::failure();
}
