// Stage project_backward: from gradient rows to the gradients of all trained parameters and of the poses, and if asked
// for, to the sums over views of their squares.
//
// A thread takes a block of Gaussians and adds up their views in order; the blocks' shares of a pose are added in order
// at the end. The sums do not depend on the number of threads.
#include <algorithm>
#include <vector>

#include "entry.h"
#include "gaussians.h"
#include "parallel.h"

namespace bytesplat {
namespace {

struct RecordInput {
    const float* table;       // [M, RECORD_WIDTH]
    const int32_t* gaussian;  // [M], ascending within a view
    const int32_t* view;      // [M], ascending
    const float* rows;        // [M, row_width]
    int64_t count;
    int row_width;
};

struct ParameterSums {
    float* means;          // [N, 3]
    float* quats;          // [N, 4]
    float* scales;         // [N, 3]
    float* opacities;      // [N]
    float* features_dc;    // [N, 3]
    float* features_rest;  // [N, stored_functions - 1, 3]
};

struct GradientOutput {
    ParameterSums gradients;
    ParameterSums squares;  // of each view's gradient; all null if they are not asked for
    float* viewmats;        // [V, 4, 4]
};

// Adds the gradients of records [first, last), at most LANES of one view, to the outputs and to dL/d[R | t].
template <bool SQUARES>
void backward_lanes(const ProjectInput& in, const RecordInput& records, const Camera<Floats>& camera, int64_t first,
                    int64_t last, const GradientOutput& out, Floats pose[3][4]) {
    // Phase 1: rows and shapes into lanes. Lanes to spare repeat the last record with zero gradient.
    RecordGradient<Floats> g{};
    Floats d_rgb[3] = {};
    for (int64_t record = first; record < last; ++record) {
        const float* row = records.rows + records.row_width * record;
        const int lane = int(record - first);
        for (int k = 0; k < 2; ++k) g.mean2d[k][lane] = row[MEAN2D + k];
        for (int k = 0; k < 3; ++k) g.conic[k][lane] = row[CONIC + k];
        g.opacity[lane] = row[OPACITY];
        g.depth[lane] = row[DEPTH];
        const float* rgb = records.table + RECORD_WIDTH * record + RGB;
        for (int c = 0; c < 3; ++c) d_rgb[c][lane] = rgb[c] > 0.0f ? row[RGB + c] : 0.0f;  // clamped: nothing passes
    }
    const Shape<Floats> shapes = in.shapes([&](int lane) { return records.gaussian[std::min(first + lane, last - 1)]; });

    // Phase 2: shape.
    const Projection<Floats> p = project_shape(shapes, camera, broadcast<Floats>(in.dilation), in.antialiased != 0);
    Shape<Floats> d_shapes{};
    project_shape_backward(shapes, camera, p, in.antialiased != 0, g, d_shapes, pose);

    // A view has one record of a Gaussian at most: what is added here is the view's whole gradient.
    const auto add = [&](float* ParameterSums::*parameter, int64_t at, float value) {
        (out.gradients.*parameter)[at] += value;
        if (SQUARES) (out.squares.*parameter)[at] += value * value;
    };

    // Phase 3: colour. Coefficients are read and their gradients written here, Gaussian by Gaussian.
    Floats centre[3], direction[3], basis[SH_FUNCTIONS_MAX], weights[SH_FUNCTIONS_MAX] = {}, d_direction[3];
    camera_centre(camera, centre);
    const Floats inverse_distance = view_direction(shapes.mean, centre, direction);
    sh_basis(in.sh_degree, direction[0], direction[1], direction[2], basis);
    for (int64_t record = first; record < last; ++record) {
        const int64_t i = records.gaussian[record];
        const int lane = int(record - first);
        const float* rest = in.rest(i);
        const int64_t first_rest = rest - in.features_rest;
        for (int c = 0; c < 3; ++c) add(&ParameterSums::features_dc, 3 * i + c, basis[0][lane] * d_rgb[c][lane]);
        for (int k = 1; k < in.functions(); ++k) {
            float weight = 0.0f;
            for (int c = 0; c < 3; ++c) {
                weight += rest[3 * (k - 1) + c] * d_rgb[c][lane];
                const int64_t at = first_rest + 3 * (k - 1) + c;
                add(&ParameterSums::features_rest, at, basis[k][lane] * d_rgb[c][lane]);
            }
            weights[k][lane] = weight;
        }
    }
    sh_direction_gradient(in.sh_degree, direction[0], direction[1], direction[2], weights, d_direction);
    view_direction_backward(camera, centre, direction, inverse_distance, d_direction, d_shapes.mean, pose);

    for (int64_t record = first; record < last; ++record) {
        const int64_t i = records.gaussian[record];
        const int lane = int(record - first);
        for (int k = 0; k < 3; ++k) add(&ParameterSums::means, 3 * i + k, d_shapes.mean[k][lane]);
        for (int k = 0; k < 4; ++k) add(&ParameterSums::quats, 4 * i + k, d_shapes.quat[k][lane]);
        for (int k = 0; k < 3; ++k) add(&ParameterSums::scales, 3 * i + k, d_shapes.scale[k][lane]);
        add(&ParameterSums::opacities, i, d_shapes.opacity[lane]);
    }
}

}  // namespace
}  // namespace bytesplat

using namespace bytesplat;

// Overwrites all outputs; Gaussians without a record receive zeros.
extern "C" int64_t bytesplat_project_backward(int threads, const ProjectInput* in, const RecordInput* records,
                                              const GradientOutput* out) try {
    constexpr int64_t BLOCK = 256;  // Gaussians
    const int64_t blocks = (in->count + BLOCK - 1) / BLOCK, views = in->views;
    std::vector<int64_t> view_begin(views + 1);
    for (int64_t view = 0; view <= views; ++view)
        view_begin[view] = std::lower_bound(records->view, records->view + records->count, int32_t(view)) - records->view;

    std::vector<double> poses(blocks * views * 12);  // dL/d[R | t] of each block and view
    parallel_for(threads, blocks, 1, [&](int64_t block) {
        const int64_t first = block * BLOCK, last = std::min(first + BLOCK, in->count);
        const auto zero = [=](float* column, int64_t width) {
            std::fill(column + width * first, column + width * last, 0.0f);
        };
        const bool squares = out->squares.means;
        for (const ParameterSums* sums : {&out->gradients, &out->squares}) {
            if (sums == &out->squares && !squares) continue;
            zero(sums->means, 3), zero(sums->quats, 4), zero(sums->scales, 3), zero(sums->opacities, 1);
            zero(sums->features_dc, 3), zero(sums->features_rest, 3 * (in->stored_functions - 1));
        }
        for (int view = 0; view < views; ++view) {
            const auto record_of = [&](int64_t i) {  // first record of this view from Gaussian i on
                const int32_t *begin = records->gaussian + view_begin[view], *end = records->gaussian + view_begin[view + 1];
                return std::lower_bound(begin, end, int32_t(i)) - records->gaussian;
            };
            const Camera<Floats> camera = spread(in->camera(view));
            Floats pose[3][4] = {};
            const int64_t end = record_of(last);
            for (int64_t record = record_of(first); record < end; record += LANES)
                (squares ? backward_lanes<true> : backward_lanes<false>)(
                    *in, *records, camera, record, std::min(record + LANES, end), *out, pose);
            for (int k = 0; k < 12; ++k)
                for (int lane = 0; lane < LANES; ++lane)
                    poses[(block * views + view) * 12 + k] += double(pose[k / 4][k % 4][lane]);
        }
    });

    for (int64_t view = 0; view < views; ++view) {
        float* viewmat = out->viewmats + 16 * view;
        std::fill_n(viewmat + 12, 4, 0.0f);
        for (int k = 0; k < 12; ++k) {
            double sum = 0.0;
            for (int64_t block = 0; block < blocks; ++block) sum += poses[(block * views + view) * 12 + k];
            viewmat[k] = float(sum);
        }
    }
    return 0;
} catch (...) {
    return bytesplat::failure();
}
