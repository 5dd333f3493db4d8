// A pinhole camera: x right, y down, z forward (OpenCV axes); the centre of the first pixel is at (0.5, 0.5).
#pragma once
#include "platform.h"

namespace bytesplat {

template <class T> struct Camera {
    T rotation[3][3];  // world to camera: x_camera = rotation x_world + translation
    T translation[3];  // world units
    T fx, fy, cx, cy;  // pixels
    T width, height;   // pixels
};

template <class T>
BS_HD inline Camera<T> load_camera(const T* viewmat,     // [4, 4] world to camera
                                   const T* intrinsics,  // [4] fx, fy, cx, cy
                                   const int* size) {    // [2] width, height
    Camera<T> camera;
    for (int i = 0; i < 3; ++i) {
        for (int j = 0; j < 3; ++j) camera.rotation[i][j] = viewmat[4 * i + j];
        camera.translation[i] = viewmat[4 * i + 3];
    }
    camera.fx = intrinsics[0];
    camera.fy = intrinsics[1];
    camera.cx = intrinsics[2];
    camera.cy = intrinsics[3];
    camera.width = T(size[0]);
    camera.height = T(size[1]);
    return camera;
}

// Where the camera stands in the world: -R^T t, world units.
template <class T> BS_HD inline void camera_centre(const Camera<T>& camera, T centre[3]) {
    for (int j = 0; j < 3; ++j) {
        centre[j] = T{};
        for (int i = 0; i < 3; ++i) centre[j] -= camera.rotation[i][j] * camera.translation[i];
    }
}

}  // namespace bytesplat
