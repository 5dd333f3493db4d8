// The photometric loss of a view, pixel by pixel and filter by filter; see ssim.h.
//
// Compile-time: TARGET_CHANNELS (3, 4), TARGET_BYTES (0: float, 1: uint8), MASKED (0, 1).
#pragma once
#include "device.h"
#include "ssim.h"

namespace bytesplat {

constexpr int MARGIN = SSIM_TAPS / 2;
constexpr int RUN = 4;                       // neighbouring outputs of a thread
constexpr int INPUTS = RUN + SSIM_TAPS - 1;  // what they are filtered from

// One view of the round. The pointers are those of the whole round, so that they stay where parameters are and take no
// registers.
struct View {
    int width, height;           // of the view
    int stride;                  // width of the stored images
    long long first;             // its first pixel
    const float* rgb;            // [pixels, 3] unclamped, without background
    const float* transmittance;  // [pixels]
    const void* target;          // [pixels, TARGET_CHANNELS]
    const unsigned char* mask;   // [pixels], if MASKED
    const float* background;     // [3] of the view

    __device__ long long pixel(int x, int y) const { return first + static_cast<long long>(y) * stride + x; }
    __device__ bool inside(int x, int y) const { return x >= 0 && y >= 0 && x < width && y < height; }
    __device__ bool keeps(int x, int y) const { return !MASKED || mask[pixel(x, y)]; }
    // Whether the window around a pixel is averaged.
    __device__ bool has_window(int x, int y) const {
        return inside(x - MARGIN, y - MARGIN) && inside(x + MARGIN, y + MARGIN) && keeps(x, y);
    }
    __device__ float composed(int x, int y, int c) const {  // before clamping
        return fmaf(transmittance[pixel(x, y)], background[c], rgb[3 * pixel(x, y) + c]);
    }
    __device__ float photo(int x, int y, int c) const {
        const long long of_pixel = pixel(x, y) * TARGET_CHANNELS;
        const auto read = [&](int channel) {
            if (TARGET_BYTES) return static_cast<const unsigned char*>(target)[of_pixel + channel] * (1.0f / 255.0f);
            return static_cast<const float*>(target)[of_pixel + channel];
        };
        if (TARGET_CHANNELS == 3) return read(c);
        return fmaf(read(c), read(3), (1.0f - read(3)) * background[c]);
    }
};

// How many pixels and windows a view averages over. counts: [V, 2] of the masks, if MASKED.
__device__ inline void read_counts(const View& view, int index, const unsigned long long* counts, float& pixels,
                                   float& windows) {
    const int across = view.width - 2 * MARGIN, down = view.height - 2 * MARGIN;
    pixels = MASKED ? counts[2 * index] : static_cast<float>(view.width) * view.height;
    windows = MASKED ? counts[2 * index + 1] : across > 0 && down > 0 ? static_cast<float>(across) * down : 0.0f;
}

// Four neighbouring outputs of the filter.
__device__ inline float4 filter(const float values[INPUTS]) {
    float sum[RUN] = {};
#pragma unroll
    for (int tap = 0; tap < SSIM_TAPS; ++tap)
#pragma unroll
        for (int k = 0; k < RUN; ++k) sum[k] = fmaf(ssim_weight(tap), values[k + tap], sum[k]);
    return make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// dL/d(colour) of a pixel, composed to `ours` where the photo is `wanted`, from the sums over its windows of d_mean,
// d_square and d_product.
__device__ inline float photometric_gradient_at(float ours, float wanted, float mean, float square, float product,
                                                float l1_scale, float ssim_scale) {
    const float sign = ours > wanted ? 1.0f : ours < wanted ? -1.0f : 0.0f;
    if (!(ours >= 0.0f && ours <= 1.0f)) return 0.0f;  // it was clamped
    return fmaf(l1_scale, sign, ssim_scale * (mean + 2.0f * ours * square + wanted * product));
}

// A view's loss from its sums: |image - photo| over pixels, SSIM over windows, channels added up.
__device__ inline float photometric_value(double differences, double similarities, float pixels, float windows,
                                          float lambda) {
    const double l1 = pixels > 0 ? differences / (3.0 * pixels) : 0.0;
    const double dssim = windows > 0 ? 1.0 - similarities / (3.0 * windows) : 0.0;
    return static_cast<float>((1.0 - lambda) * l1 + lambda * dssim);
}
// What a pixel's and a window's terms are multiplied with in it.
__device__ inline float l1_scale_of(float pixels, float lambda) {
    return pixels > 0 ? (1.0f - lambda) / (3.0f * pixels) : 0.0f;
}
__device__ inline float ssim_scale_of(float windows, float lambda) {
    return windows > 0 ? -lambda / (3.0f * windows) : 0.0f;
}

}  // namespace bytesplat
