// Front-to-back alpha blending of one Gaussian into one pixel, and its derivative walked in the SAME order.
//
// Forward (Kerbl et al. 2023, eq. 3): C = sum_i c_i alpha_i T_i,  T_i = prod_{j<i} (1 - alpha_j).
// Backward: let s_i = dL/dC . c_i + dL/dD z_i, and R_i = sum_{j>i} s_j alpha_j T_j + T_end dL/dT_end, what Gaussians
// behind i and the background still add to the differentiated scalar. Then dL/dalpha_i = T_i s_i - R_i / (1 - alpha_i).
// R starts at dL/dC . C + dL/dD D + dL/dT T_end, known from the forward pass, and loses s_i alpha_i T_i at each step: no
// intermediate state has to survive between the passes.
//
// Both directions call the same functions, so that they skip and stop at exactly the same Gaussians.
#pragma once
#include "layout.h"
#include "platform.h"

namespace bytesplat {

// sigma of the Gaussian at offset (dx, dy) from its mean, for the conic [[a, b], [b, c]]. Explicit fma: the compiler must
// not round the two directions differently.
template <class T> BS_HD inline T blend_sigma(T half_a, T b, T half_c, T dx, T dy) {
    return fma(dx, fma(half_a, dx, b * dy), half_c * dy * dy);
}

// Opacity before clamping, exp(-sigma) being `visibility`, to the one that is blended: clamped, or zero if too faint.
template <class T> BS_HD inline T blend_alpha(T opacity, T visibility) {
    const T alpha = smaller(opacity * visibility, broadcast<T>(ALPHA_MAX));
    return alpha >= ALPHA_MIN ? alpha : T{};
}

template <class T> struct Contribution {
    T alpha;   // zero where the Gaussian adds nothing to the pixel
    T weight;  // alpha T
    T passed;  // 1 - alpha, whether added or not
};

// One step of a pixel. `transmittance` is positive while the pixel is live and is updated; a pixel that stops keeps its
// final transmittance with the sign flipped, and a stopped pixel (or one outside the image, started at -1) is not
// changed by further steps. alpha = 0 is a step without effect.
template <StopRule STOP, class T> BS_HD inline Contribution<T> blend_step(T alpha, T& transmittance) {
    const T before = transmittance;
    const T passed = 1.0f - alpha;
    const T after = before * passed;
    const auto stays = after > TRANSMITTANCE_MIN;  // never true of a stopped pixel: its transmittance is negative
    if constexpr (STOP == StopRule::drop) {
        const T blended = stays ? alpha : T{};
        transmittance = stays ? after : smaller(before, -before);
        return {blended, blended * before, passed};
    } else {
        const T blended = before > T{} ? alpha : T{};
        transmittance = stays ? after : smaller(before, -after);
        return {blended, blended * before, passed};
    }
}

// dL/dalpha of one contribution. `before` is T ahead of the step, `scalar` is s; `rest` is R and is updated.
// Means nothing where the contribution is zero: multiply by its alpha, as blend_power_gradient does.
template <class T>
BS_HD inline T blend_alpha_gradient(const Contribution<T>& contribution, T before, T scalar, T& rest) {
    rest = fma(-contribution.weight, scalar, rest);
    return before * scalar - rest * (1.0f / contribution.passed);
}

// dL/d(-sigma) = alpha dL/dalpha; zero where alpha is clamped. Everything a Gaussian's shape receives is a moment of it:
// d mean_x = sum p (a dx + b dy), d a = -sum p dx^2 / 2, d b = -sum p dx dy, d opacity = sum p / opacity, with
// (dx, dy) from mean to pixel.
template <class T> BS_HD inline T blend_power_gradient(T alpha, T opacity, T visibility, T alpha_gradient) {
    return opacity * visibility <= ALPHA_MAX ? alpha * alpha_gradient : T{};
}

}  // namespace bytesplat
