// What the projection stages read: the trained Gaussians, the round's cameras and the settings.
#pragma once

#include <cstdint>

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

    Shape<float> shape(int64_t i) const {
        Shape<float> shape;
        for (int k = 0; k < 3; ++k) shape.mean[k] = means[3 * i + k];
        for (int k = 0; k < 4; ++k) shape.quat[k] = quats[4 * i + k];
        for (int k = 0; k < 3; ++k) shape.scale[k] = scales[3 * i + k];
        shape.opacity = opacities[i];
        return shape;
    }

    // Spherical harmonics in use: those asked for, as far as they are stored.
    int functions() const { return smaller(sh_functions(sh_degree), stored_functions); }

    const float* rest(int64_t i) const { return features_rest + 3 * (stored_functions - 1) * i; }
};

}  // namespace bytesplat
