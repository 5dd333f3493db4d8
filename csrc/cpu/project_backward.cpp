// Stage project_backward: from gradient rows to the gradients of all trained parameters and of the poses.
//
// A thread takes a block of Gaussians and adds up their views in order; the blocks' shares of a pose are added in order
// at the end. The sums do not depend on the number of threads.
#include <algorithm>
#include <vector>

#include "gaussians.h"

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

struct GradientOutput {
    float* means;          // [N, 3]
    float* quats;          // [N, 4]
    float* scales;         // [N, 3]
    float* opacities;      // [N]
    float* features_dc;    // [N, 3]
    float* features_rest;  // [N, stored_functions - 1, 3]
    float* viewmats;       // [V, 4, 4]
};

using PoseGradient = double[3][4];

void record_backward(const ProjectInput& in, const Camera<float>& camera, const float centre[3], int64_t i,
                     const float* record, const float* row, const GradientOutput& out, PoseGradient& pose) {
    // Phase 1: shape.
    const Shape<float> shape = in.shape(i);
    const Projection<float> p = project_shape(shape, camera, in.dilation, in.antialiased != 0);
    const RecordGradient<float> g{{row[MEAN2D], row[MEAN2D + 1]},
                                  {row[CONIC], row[CONIC + 1], row[CONIC + 2]},
                                  row[OPACITY],
                                  row[DEPTH]};
    Shape<float> d_shape{};
    float d_viewmat[3][4] = {};
    project_shape_backward(shape, camera, p, in.antialiased != 0, g, d_shape, d_viewmat);

    // Phase 2: colour. A channel clamped at zero passes nothing on.
    float d_rgb[3], direction[3], basis[SH_FUNCTIONS_MAX], weights[SH_FUNCTIONS_MAX], d_direction[3];
    for (int c = 0; c < 3; ++c) d_rgb[c] = record[RGB + c] > 0.0f ? row[RGB + c] : 0.0f;
    const float inverse_distance = view_direction(shape.mean, centre, direction);
    sh_basis(in.sh_degree, direction[0], direction[1], direction[2], basis);
    std::fill_n(weights, SH_FUNCTIONS_MAX, 0.0f);  // what is not stored counts as zero
    const float* rest = in.rest(i);
    float* d_rest = out.features_rest + (rest - in.features_rest);
    for (int c = 0; c < 3; ++c) out.features_dc[3 * i + c] += basis[0] * d_rgb[c];
    for (int k = 1; k < in.functions(); ++k)
        for (int c = 0; c < 3; ++c) {
            weights[k] += rest[3 * (k - 1) + c] * d_rgb[c];
            d_rest[3 * (k - 1) + c] += basis[k] * d_rgb[c];
        }
    sh_direction_gradient(in.sh_degree, direction[0], direction[1], direction[2], weights, d_direction);
    view_direction_backward(camera, centre, direction, inverse_distance, d_direction, d_shape.mean, d_viewmat);

    for (int k = 0; k < 3; ++k) out.means[3 * i + k] += d_shape.mean[k];
    for (int k = 0; k < 4; ++k) out.quats[4 * i + k] += d_shape.quat[k];
    for (int k = 0; k < 3; ++k) out.scales[3 * i + k] += d_shape.scale[k];
    out.opacities[i] += d_shape.opacity;
    for (int k = 0; k < 3; ++k)
        for (int j = 0; j < 4; ++j) pose[k][j] += double(d_viewmat[k][j]);
}

}  // namespace
}  // namespace bytesplat

using namespace bytesplat;

// Overwrites all outputs; Gaussians without a record receive zeros.
extern "C" void bytesplat_project_backward(int threads, const ProjectInput* in, const RecordInput* records,
                                           const GradientOutput* out) {
    constexpr int64_t BLOCK = 256;  // Gaussians
    const int64_t blocks = (in->count + BLOCK - 1) / BLOCK, views = in->views;
    std::vector<int64_t> view_begin(views + 1);
    for (int64_t view = 0; view <= views; ++view)
        view_begin[view] = std::lower_bound(records->view, records->view + records->count, int32_t(view)) - records->view;

    struct Pose {
        PoseGradient gradient;
    };
    std::vector<Pose> poses(blocks * views);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * BLOCK, last = std::min(first + BLOCK, in->count);
        const auto zero = [=](float* column, int64_t width) {
            std::fill(column + width * first, column + width * last, 0.0f);
        };
        zero(out->means, 3), zero(out->quats, 4), zero(out->scales, 3), zero(out->opacities, 1);
        zero(out->features_dc, 3), zero(out->features_rest, 3 * (in->stored_functions - 1));
        for (int view = 0; view < views; ++view) {
            const Camera<float> camera = in->camera(view);
            float centre[3];
            camera_centre(camera, centre);
            const int32_t* view_end = records->gaussian + view_begin[view + 1];
            const int32_t* gaussian = std::lower_bound(records->gaussian + view_begin[view], view_end, int32_t(first));
            for (; gaussian < view_end && *gaussian < last; ++gaussian) {
                const int64_t record = gaussian - records->gaussian;
                record_backward(*in, camera, centre, *gaussian, records->table + RECORD_WIDTH * record,
                                records->rows + records->row_width * record, *out, poses[block * views + view].gradient);
            }
        }
    }

    for (int64_t view = 0; view < views; ++view)
        for (int k = 0; k < 4; ++k)
            for (int j = 0; j < 4; ++j) {
                double sum = 0.0;
                for (int64_t block = 0; k < 3 && block < blocks; ++block) sum += poses[block * views + view].gradient[k][j];
                out->viewmats[16 * view + 4 * k + j] = float(sum);
            }
}
