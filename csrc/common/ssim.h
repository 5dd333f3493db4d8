// Structural similarity (Wang et al. 2004, eq. 13) over an 11 x 11 Gaussian window, and its derivatives.
#pragma once
#include "platform.h"

namespace bytesplat {

constexpr int SSIM_TAPS = 11;  // side of the window, pixels

// Separable weights of the window: a Gaussian of sigma 1.5 px, normalised to sum 1.
BS_HD inline constexpr float ssim_weight(int tap) {
    constexpr float half[6] = {0.00102838008f, 0.00759875814f, 0.0360007721f, 0.10936069f, 0.213005538f, 0.266011725f};
    return half[tap < 6 ? tap : 10 - tap];
}

template <class T> struct Ssim {
    T value;
    T d_mean;     // dSSIM / dE[x], E[x^2] and E[x y] held
    T d_square;   // dSSIM / dE[x^2]
    T d_product;  // dSSIM / dE[x y]
};

// SSIM of one window from the weighted means E[.] of image x and target y over it, both in [0, 1]; derivatives with
// respect to the image's terms. dL/dx of a pixel is then sum over the windows that hold it of
// weight (d_mean + 2 x d_square + y d_product).
template <class T> BS_HD inline Ssim<T> ssim(T mean_x, T mean_y, T square_x, T square_y, T product) {
    constexpr float C1 = 0.01f * 0.01f, C2 = 0.03f * 0.03f;
    const T variance_x = square_x - mean_x * mean_x;
    const T variance_y = square_y - mean_y * mean_y;
    const T covariance = product - mean_x * mean_y;
    const T luminance = 2.0f * mean_x * mean_y + C1;
    const T structure = 2.0f * covariance + C2;
    const T inverse_means = 1.0f / (mean_x * mean_x + mean_y * mean_y + C1);
    const T inverse_variances = 1.0f / (variance_x + variance_y + C2);
    const T inverse = inverse_means * inverse_variances;
    const T value = luminance * structure * inverse;
    return {value,
            2.0f * (mean_y * (structure - luminance) * inverse + mean_x * value * (inverse_variances - inverse_means)),
            -value * inverse_variances,
            2.0f * luminance * inverse};
}

}  // namespace bytesplat
