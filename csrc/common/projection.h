// A 3D Gaussian seen by a camera: elliptical weighted average splatting (Zwicker et al. 2002, "EWA Splatting"), with the
// dilation of 3D Gaussian Splatting, and its derivative. Raw parameters in (as trained), gradients of raw parameters out.
//
// With W the camera's rotation, J the Jacobian of the perspective division at the mean, R the Gaussian's rotation and S its
// diagonal of standard deviations, the 2D covariance is cov = B B^T + dilation I with the 2 x 3 matrix B = J W R S.
// Everything derives from B: det(B B^T) = |b1 x b2|^2 and det(cov) = det(B B^T) + dilation tr(B B^T) + dilation^2 are
// sums of positive terms, so that needles lose no digits to cancellation. So is the derivative of det(B B^T), 2 P with
// P = (b2 x (b1 x b2), (b1 x b2) x b1), and with it conic B = (dilation B + P) / det(cov), on which backward is built.
#pragma once
#include "camera.h"
#include "ellipse.h"

namespace bytesplat {

// One Gaussian's shape, as trained.
template <class T> struct Shape {
    T mean[3];   // world units
    T quat[4];   // w, x, y, z; any non-zero norm
    T scale[3];  // natural logarithm of the standard deviations, world units
    T opacity;   // logit
};

// dL/d(what a record says about the shape): the columns of a gradient row that reach it.
template <class T> struct RecordGradient {
    T mean2d[2], conic[3], opacity, depth;
};

// The forward pass with all that the backward pass reuses.
template <class T> struct Projection {
    T mean[3];              // camera axes, world units
    T slope[2];             // x/z, y/z
    T bounded[2];           // the same, clamped for J only
    T rotation[3][3];       // R
    T axes[3][3];           // R S
    T jacobian_world[2][3];  // J W
    T footprint[2][3];      // B, pixels
    T determinant_slope[2][3];  // P, pixels^3
    T conic_footprint[2][3];    // conic B, 1 / pixels
    T xx, xy, yy;           // cov, dilated, pixel^2
    T undilated_determinant, determinant;
    T compensation;         // factor of opacity: 1, or sqrt(det(B B^T) / det(cov)) (Yu et al. 2024, Mip-Splatting)
    T sigmoid;              // opacity before compensation
    // What the record holds.
    T mean2d[2], conic[3], opacity;
    T radius;               // three standard deviations along the major axis, pixels
};

// a x b, each component to within two rounding errors.
template <class T> BS_HD inline void cross_product(const T a[3], const T b[3], T out[3]) {
    for (int i = 0; i < 3; ++i) {
        const int j = (i + 1) % 3, k = (i + 2) % 3;
        out[i] = difference_of_products(a[j], b[k], a[k], b[j]);
    }
}

template <class T> BS_HD inline void rotation_from_quat(const T quat[4], T inverse_norm, T R[3][3]) {
    const T w = quat[0] * inverse_norm, x = quat[1] * inverse_norm, y = quat[2] * inverse_norm, z = quat[3] * inverse_norm;
    R[0][0] = 1.0f - 2.0f * (y * y + z * z);
    R[0][1] = 2.0f * (x * y - w * z);
    R[0][2] = 2.0f * (x * z + w * y);
    R[1][0] = 2.0f * (x * y + w * z);
    R[1][1] = 1.0f - 2.0f * (x * x + z * z);
    R[1][2] = 2.0f * (y * z - w * x);
    R[2][0] = 2.0f * (x * z - w * y);
    R[2][1] = 2.0f * (y * z + w * x);
    R[2][2] = 1.0f - 2.0f * (x * x + y * y);
}

// dL/dquat (as trained) from dL/dR.
template <class T>
BS_HD inline void rotation_from_quat_backward(const T quat[4], T inverse_norm, const T g[3][3], T gradient[4]) {
    const T w = quat[0] * inverse_norm, x = quat[1] * inverse_norm, y = quat[2] * inverse_norm, z = quat[3] * inverse_norm;
    const T unit[4] = {w, x, y, z};
    gradient[0] = 2.0f * (x * (g[2][1] - g[1][2]) + y * (g[0][2] - g[2][0]) + z * (g[1][0] - g[0][1]));
    gradient[1] = 2.0f * (w * (g[2][1] - g[1][2]) + y * (g[0][1] + g[1][0]) + z * (g[0][2] + g[2][0])) -
                  4.0f * x * (g[1][1] + g[2][2]);
    gradient[2] = 2.0f * (w * (g[0][2] - g[2][0]) + x * (g[0][1] + g[1][0]) + z * (g[1][2] + g[2][1])) -
                  4.0f * y * (g[0][0] + g[2][2]);
    gradient[3] = 2.0f * (w * (g[1][0] - g[0][1]) + x * (g[0][2] + g[2][0]) + y * (g[1][2] + g[2][1])) -
                  4.0f * z * (g[0][0] + g[1][1]);
    T along = T{};  // the norm has no effect: only what is across the unit quaternion counts
    for (int i = 0; i < 4; ++i) along += unit[i] * gradient[i];
    for (int i = 0; i < 4; ++i) gradient[i] = (gradient[i] - along * unit[i]) * inverse_norm;
}

template <class T> BS_HD inline T inverse_quat_norm(const T q[4]) {
    return 1.0f / sqrt(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3]);
}

// Camera-axes mean only: what decides about the near and far planes.
template <class T> BS_HD inline void camera_mean(const Camera<T>& camera, const T mean[3], T out[3]) {
    for (int i = 0; i < 3; ++i)
        out[i] = camera.rotation[i][0] * mean[0] + camera.rotation[i][1] * mean[1] + camera.rotation[i][2] * mean[2] +
                 camera.translation[i];
}

template <class T>
BS_HD inline Projection<T> project_shape(const Shape<T>& shape, const Camera<T>& camera, T dilation, bool antialiased) {
    Projection<T> p;

    // Phase 1: the mean. J is taken no further than 0.3 of the half field of view outside the image, where the
    // first-order approximation breaks down.
    camera_mean(camera, shape.mean, p.mean);
    const T inverse_z = 1.0f / p.mean[2];
    const T focal[2] = {camera.fx, camera.fy}, principal[2] = {camera.cx, camera.cy};
    const T size[2] = {camera.width, camera.height};
    for (int i = 0; i < 2; ++i) {
        const T margin = 0.3f * 0.5f * size[i] / focal[i];
        p.slope[i] = p.mean[i] * inverse_z;
        p.bounded[i] = clamp(p.slope[i], -(principal[i] / focal[i] + margin), (size[i] - principal[i]) / focal[i] + margin);
        p.mean2d[i] = focal[i] * p.slope[i] + principal[i];
    }

    // Phase 2: B = J W R S, row by row: J = (f/z) [[1, 0, -x/z], [0, 1, -y/z]].
    rotation_from_quat(shape.quat, inverse_quat_norm(shape.quat), p.rotation);
    for (int j = 0; j < 3; ++j) {
        const T deviation = exp(shape.scale[j]);
        for (int i = 0; i < 3; ++i) p.axes[i][j] = p.rotation[i][j] * deviation;
    }
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 3; ++j)
            p.jacobian_world[i][j] =
                focal[i] * inverse_z * (camera.rotation[i][j] - p.bounded[i] * camera.rotation[2][j]);
        for (int j = 0; j < 3; ++j)
            p.footprint[i][j] = p.jacobian_world[i][0] * p.axes[0][j] + p.jacobian_world[i][1] * p.axes[1][j] +
                                p.jacobian_world[i][2] * p.axes[2][j];
    }

    // Phase 3: covariance, conic, opacity.
    const T* u = p.footprint[0];
    const T* v = p.footprint[1];
    const T bare_xx = u[0] * u[0] + u[1] * u[1] + u[2] * u[2];
    const T bare_yy = v[0] * v[0] + v[1] * v[1] + v[2] * v[2];
    p.xy = u[0] * v[0] + u[1] * v[1] + u[2] * v[2];
    T cross[3];
    cross_product(u, v, cross);
    p.undilated_determinant = cross[0] * cross[0] + cross[1] * cross[1] + cross[2] * cross[2];
    p.determinant = p.undilated_determinant + dilation * (bare_xx + bare_yy) + dilation * dilation;
    p.xx = bare_xx + dilation;
    p.yy = bare_yy + dilation;
    p.conic[0] = p.yy / p.determinant;
    p.conic[1] = -p.xy / p.determinant;
    p.conic[2] = p.xx / p.determinant;
    cross_product(v, cross, p.determinant_slope[0]);
    cross_product(cross, u, p.determinant_slope[1]);
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 3; ++j)
            p.conic_footprint[i][j] = (dilation * p.footprint[i][j] + p.determinant_slope[i][j]) / p.determinant;
    p.sigmoid = 1.0f / (1.0f + exp(-shape.opacity));
    p.compensation = antialiased ? sqrt(p.undilated_determinant / p.determinant) : broadcast<T>(1.0f);
    p.opacity = p.sigmoid * p.compensation;
    const T half_difference = 0.5f * (p.xx - p.yy);
    const T major = 0.5f * (p.xx + p.yy) + sqrt(half_difference * half_difference + p.xy * p.xy);
    p.radius = 3.0f * sqrt(major);
    return p;
}

// Whether [mean - extent, mean + extent] holds a pixel centre of an axis of `size` pixels.
template <class T> BS_HD inline bool holds_pixel_centre(T mean, T extent, T size) {
    return larger(ceil(mean - extent - 0.5f), T{}) <= smaller(floor(mean + extent - 0.5f), size - 1.0f);
}

// Whether the Gaussian makes a record: between the planes, finite, and the bounding box of its ellipse holds a pixel
// centre of the image. NaN fails every comparison.
template <class T>
BS_HD inline bool projection_visible(const Projection<T>& p, const Camera<T>& camera, T near_plane, T far_plane) {
    if (!(p.mean[2] > near_plane && p.mean[2] < far_plane)) return false;
    if (!(p.determinant > T{} && p.opacity >= ALPHA_MIN)) return false;
    if (!is_finite(p.mean2d[0] + p.mean2d[1] + p.conic[0] + p.conic[1] + p.conic[2] + p.radius)) return false;
    const T reach = 2.0f * ellipse_threshold(p.opacity);
    return holds_pixel_centre(p.mean2d[0], sqrt(reach * p.xx), camera.width) &&
           holds_pixel_centre(p.mean2d[1], sqrt(reach * p.yy), camera.height);
}

// Backward of project_shape: adds to `shape_gradient` (raw parameters) and to dL/d[R | t] of the camera.
template <class T>
BS_HD inline void project_shape_backward(const Shape<T>& shape, const Camera<T>& camera, const Projection<T>& p,
                                         bool antialiased, const RecordGradient<T>& g, Shape<T>& shape_gradient,
                                         T viewmat_gradient[3][4]) {
    // Phase 3: with the symmetric matrix G of dL/dconic (the record's b stands for both off-diagonal entries),
    // dL/dB = -2 conic G (conic B), and dL/dlog s_j = b_j . dL/db_j = -2 (conic b_j)^T G (conic b_j).
    T g_footprint[2][3];
    for (int j = 0; j < 3; ++j) {
        const T top = p.conic_footprint[0][j], bottom = p.conic_footprint[1][j];
        const T g_top = g.conic[0] * top + 0.5f * g.conic[1] * bottom;
        const T g_bottom = 0.5f * g.conic[1] * top + g.conic[2] * bottom;
        g_footprint[0][j] = -2.0f * (p.conic[0] * g_top + p.conic[1] * g_bottom);
        g_footprint[1][j] = -2.0f * (p.conic[1] * g_top + p.conic[2] * g_bottom);
        shape_gradient.scale[j] -= 2.0f * (top * g_top + bottom * g_bottom);
    }
    const T g_sigmoid = g.opacity * p.compensation;
    shape_gradient.opacity += g_sigmoid * p.sigmoid * (1.0f - p.sigmoid);
    if (antialiased) {
        // compensation k = sqrt(det0 / det), det0 = det(B B^T): dk/dB = (P - det0 conic B) / (k det). A visible
        // Gaussian has opacity >= ALPHA_MIN, so k is not zero.
        const T factor = g.opacity * p.sigmoid / (p.compensation * p.determinant);
        for (int i = 0; i < 2; ++i)
            for (int j = 0; j < 3; ++j) {
                const T g_entry =
                    factor * (p.determinant_slope[i][j] - p.undilated_determinant * p.conic_footprint[i][j]);
                g_footprint[i][j] += g_entry;
                shape_gradient.scale[j] += p.footprint[i][j] * g_entry;
            }
    }

    // Phase 2: B = (J W) (R S).
    T g_jacobian_world[2][3], g_rotation[3][3];
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 3; ++j)
            g_jacobian_world[i][j] = g_footprint[i][0] * p.axes[j][0] + g_footprint[i][1] * p.axes[j][1] +
                                     g_footprint[i][2] * p.axes[j][2];
    for (int j = 0; j < 3; ++j) {
        const T deviation = exp(shape.scale[j]);
        for (int i = 0; i < 3; ++i)
            g_rotation[i][j] = deviation * (p.jacobian_world[0][i] * g_footprint[0][j] +
                                            p.jacobian_world[1][i] * g_footprint[1][j]);
    }
    T g_quat[4];
    rotation_from_quat_backward(shape.quat, inverse_quat_norm(shape.quat), g_rotation, g_quat);
    for (int i = 0; i < 4; ++i) shape_gradient.quat[i] += g_quat[i];

    // Phase 1: row i of J W is (f/z) (W_i - bounded_i W_2). Where the slope is clamped, bounded_i is constant.
    const T inverse_z = 1.0f / p.mean[2];
    const T focal[2] = {camera.fx, camera.fy};
    T g_mean[3] = {T{}, T{}, g.depth};
    for (int i = 0; i < 2; ++i) {
        const T* row = g_jacobian_world[i];
        const T f_over_z = focal[i] * inverse_z;
        T g_scale = T{}, g_bounded = T{};  // of f/z, up to f/z itself; of bounded_i
        for (int j = 0; j < 3; ++j) {
            g_scale += row[j] * p.jacobian_world[i][j];
            g_bounded -= row[j] * f_over_z * camera.rotation[2][j];
            viewmat_gradient[i][j] += f_over_z * row[j];
            viewmat_gradient[2][j] -= f_over_z * p.bounded[i] * row[j];
        }
        const T g_slope = focal[i] * g.mean2d[i] + (p.bounded[i] == p.slope[i] ? g_bounded : T{});
        g_mean[i] = g_slope * inverse_z;
        g_mean[2] -= (g_slope * p.slope[i] + g_scale) * inverse_z;
    }
    for (int i = 0; i < 3; ++i) {
        for (int j = 0; j < 3; ++j) {
            shape_gradient.mean[j] += camera.rotation[i][j] * g_mean[i];
            viewmat_gradient[i][j] += g_mean[i] * shape.mean[j];
        }
        viewmat_gradient[i][3] += g_mean[i];
    }
}

// The direction in which a camera sees a mean: unit, world axes. Returns 1 / distance.
template <class T> BS_HD inline T view_direction(const T mean[3], const T centre[3], T direction[3]) {
    T square = T{};
    for (int i = 0; i < 3; ++i) {
        direction[i] = mean[i] - centre[i];
        square += direction[i] * direction[i];
    }
    const T inverse_distance = 1.0f / sqrt(square);
    for (int i = 0; i < 3; ++i) direction[i] *= inverse_distance;
    return inverse_distance;
}

// Backward of view_direction: adds to dL/dmean and to dL/d[R | t], the centre being -R^-1 t.
template <class T>
BS_HD inline void view_direction_backward(const Camera<T>& camera, const T centre[3], const T direction[3],
                                          T inverse_distance, const T g[3], T mean_gradient[3],
                                          T viewmat_gradient[3][4]) {
    const T along = g[0] * direction[0] + g[1] * direction[1] + g[2] * direction[2];
    T g_mean[3];
    for (int i = 0; i < 3; ++i) {
        g_mean[i] = (g[i] - along * direction[i]) * inverse_distance;
        mean_gradient[i] += g_mean[i];
    }
    for (int i = 0; i < 3; ++i) {
        const T g_camera =
            camera.rotation[i][0] * g_mean[0] + camera.rotation[i][1] * g_mean[1] + camera.rotation[i][2] * g_mean[2];
        for (int j = 0; j < 3; ++j) viewmat_gradient[i][j] += g_camera * centre[j];
        viewmat_gradient[i][3] += g_camera;
    }
}

}  // namespace bytesplat
