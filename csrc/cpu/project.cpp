// Stage project: a record for every (view, Gaussian) pair that can reach a pixel.
#include <algorithm>
#include <vector>

#include "gaussians.h"

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

// Colour of a Gaussian seen along `direction`; false when it is not finite.
bool colour(const ProjectInput& in, int64_t i, const float direction[3], float rgb[3]) {
    float basis[SH_FUNCTIONS_MAX];
    sh_basis(in.sh_degree, direction[0], direction[1], direction[2], basis);
    const float* rest = in.rest(i);
    for (int c = 0; c < 3; ++c) rgb[c] = 0.5f + basis[0] * in.features_dc[3 * i + c];
    for (int k = 1; k < in.functions(); ++k)
        for (int c = 0; c < 3; ++c) rgb[c] += basis[k] * rest[3 * (k - 1) + c];
    const bool finite = is_finite(rgb[0] + rgb[1] + rgb[2]);
    for (int c = 0; c < 3; ++c) rgb[c] = larger(rgb[c], 0.0f);
    return finite;
}

// Writes the pair's record at `row`; false when it has none.
bool project_pair(const ProjectInput& in, const Camera<float>& camera, const float centre[3], int view, int64_t i,
                  const RecordOutput& out, int64_t row) {
    const Shape<float> shape = in.shape(i);
    float mean[3];
    camera_mean(camera, shape.mean, mean);
    if (!(mean[2] > in.near_plane && mean[2] < in.far_plane)) return false;  // spares the rest of the work
    const Projection<float> p = project_shape(shape, camera, in.dilation, in.antialiased != 0);
    if (!projection_visible(p, camera, in.near_plane, in.far_plane)) return false;
    float* record = out.table + RECORD_WIDTH * row;
    float direction[3];
    view_direction(shape.mean, centre, direction);
    if (!colour(in, i, direction, record + RGB)) return false;
    std::copy_n(p.mean2d, 2, record + MEAN2D);
    std::copy_n(p.conic, 3, record + CONIC);
    record[OPACITY] = p.opacity;
    record[DEPTH] = p.mean[2];
    out.gaussian[row] = int32_t(i);
    out.view[row] = view;
    out.radius[row] = p.radius;
    out.ids[row] = in.ids[i];
    return true;
}

}  // namespace
}  // namespace bytesplat

using namespace bytesplat;

// Returns the number of records M; the outputs' first M rows are filled.
extern "C" int64_t bytesplat_project(int threads, const ProjectInput* in, const RecordOutput* out) {
    constexpr int64_t BLOCK = 1024;  // Gaussians; each block writes its records where its own pairs have room
    const int64_t blocks = (in->count + BLOCK - 1) / BLOCK;
    std::vector<int64_t> records(in->views * blocks);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t block = 0; block < in->views * blocks; ++block) {
        const int view = int(block / blocks);
        const Camera<float> camera = in->camera(view);
        float centre[3];
        camera_centre(camera, centre);
        const int64_t first = block % blocks * BLOCK, last = std::min(first + BLOCK, in->count);
        int64_t row = view * in->count + first;
        for (int64_t i = first; i < last; ++i) row += project_pair(*in, camera, centre, view, i, *out, row);
        records[block] = row - (view * in->count + first);
    }

    int64_t total = 0;
    for (int64_t block = 0; block < in->views * blocks; ++block) {  // close the gaps
        out->move(block / blocks * in->count + block % blocks * BLOCK, records[block], total);
        total += records[block];
    }
    return total;
}
