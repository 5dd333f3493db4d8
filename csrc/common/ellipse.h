// The part of the image that a projected Gaussian reaches: the ellipse { alpha >= ALPHA_MIN }.
//
// With sigma(d) = (a dx^2 + c dy^2) / 2 + b dx dy the opacity at offset d is opacity exp(-sigma), so the ellipse is
// { sigma <= ln(opacity / ALPHA_MIN) }. Boxes are tested against it exactly (as in Speedy-Splat and StopThePop).
#pragma once
#include "layout.h"
#include "platform.h"

namespace bytesplat {

// Largest sigma that still counts, for opacity >= ALPHA_MIN.
template <class T> BS_HD inline T ellipse_threshold(T opacity) { return larger(log(opacity * 255.0f), T{}); }

template <class T> BS_HD inline T ellipse_sigma(T a, T b, T c, T dx, T dy) {
    return 0.5f * (a * dx * dx + c * dy * dy) + b * dx * dy;
}

// Half of the sides of the ellipse's bounding box, pixels: sqrt(2 threshold cov_xx) and its twin, cov = conic^-1.
// A conic that rounding has made indefinite (a needle of extreme length) is taken as unbounded.
template <class T> BS_HD inline void ellipse_half_extent(T a, T b, T c, T threshold, T extent[2]) {
    const T determinant = difference_of_products(a, c, b, b);
    const bool bounded = determinant > T{};
    extent[0] = bounded ? sqrt(2.0f * threshold * c / determinant) : T(1e18f);
    extent[1] = bounded ? sqrt(2.0f * threshold * a / determinant) : T(1e18f);
}

// Least sigma over the box [x0, x1] x [y0, y1] of offsets from the mean. sigma is convex, so the least value lies on the
// edges that face the mean: the best point of the nearest vertical edge or that of the nearest horizontal one. Where
// the box holds the mean both candidates are the mean itself.
template <class T> BS_HD inline T box_sigma(T a, T b, T c, T x0, T x1, T y0, T y1) {
    const T edge_x = clamp(T{}, x0, x1), edge_y = clamp(T{}, y0, y1);
    const T on_vertical = ellipse_sigma(a, b, c, edge_x, clamp(-b / c * edge_x, y0, y1));
    const T on_horizontal = ellipse_sigma(a, b, c, clamp(-b / a * edge_y, x0, x1), edge_y);
    return smaller(on_vertical, on_horizontal);
}

}  // namespace bytesplat
