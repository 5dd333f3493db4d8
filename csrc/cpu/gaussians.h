// What the projection stages read: the trained Gaussians, the round's cameras and the settings.
#pragma once

#include "lanes.h"

#include "../common/projection.h"
#include "../common/sh.h"

namespace bytesplat {

struct ProjectInput {
    // Gaussians, as trained: N rows each.
    int64_t count;
    const float* means;          // [N, 3]
    const float* quats;          // [N, 4]
    const float* scales;         // [N, 3]
    const float* opacities;      // [N]
    const float* features_dc;    // [N, 3]
    const float* features_rest;  // [N, stored_functions - 1, 3]
    const int64_t* ids;          // [N]
    int stored_functions;        // spherical harmonics per Gaussian and channel, degree 0 included
    // Cameras: V rows each.
    int views;
    const float* viewmats;    // [V, 4, 4]
    const float* intrinsics;  // [V, 4]
    const int32_t* sizes;     // [V, 2]
    // Settings.
    int sh_degree;
    int antialiased;
    float near_plane, far_plane, dilation;

    Camera<float> camera(int view) const {
        return load_camera(viewmats + 16 * view, intrinsics + 4 * view, sizes + 2 * view);
    }

    // Shapes of LANES Gaussians, that of lane l being Gaussian index(l).
    template <class Index> Shape<Floats> shapes(Index index) const {
        Shape<Floats> result;
        for (int lane = 0; lane < LANES; ++lane) {
            const int64_t i = index(lane);
            for (int k = 0; k < 3; ++k) result.mean[k][lane] = means[3 * i + k];
            for (int k = 0; k < 4; ++k) result.quat[k][lane] = quats[4 * i + k];
            for (int k = 0; k < 3; ++k) result.scale[k][lane] = scales[3 * i + k];
            result.opacity[lane] = opacities[i];
        }
        return result;
    }

    // Spherical harmonics in use: those asked for, as far as they are stored.
    int functions() const { return smaller(sh_functions(sh_degree), stored_functions); }

    const float* rest(int64_t i) const { return features_rest + 3 * (stored_functions - 1) * i; }
};

}  // namespace bytesplat
