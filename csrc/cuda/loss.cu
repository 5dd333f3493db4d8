// The photometric loss of each view, (1 - lambda) L1 + lambda (1 - SSIM), and its gradient (ssim.h).
//
// photometric_terms forms the sums of both terms and, for each window, the derivatives of its SSIM; photometric_gradient
// spreads these back over the windows' pixels. Both filter 32 x 32 pixels a block, first along rows, then along columns;
// a thread makes four neighbouring outputs, so that it reads each input once and not eleven times.
//
// Compile-time: TARGET_CHANNELS (3, 4), TARGET_BYTES (0: float, 1: uint8), MASKED (0, 1).
#include "device.h"
#include "ssim.h"
#include "step.h"

using namespace bytesplat;

constexpr int SIDE = 32;             // of a block's part of the image
constexpr int MARGIN = SSIM_TAPS / 2;
constexpr int HALO = SIDE + 2 * MARGIN;
constexpr int PITCH = HALO + 2;      // a multiple of four floats
constexpr int THREADS = 256;
constexpr int RUN = 4;               // neighbouring outputs of a thread

// One view of the round.
struct View {
    int width, height;         // of the view
    int stride;                // width of the stored images
    const float* rgb;          // [height, stride, 3] unclamped, without background
    const float* transmittance;  // [height, stride]
    const void* target;        // [height, stride, TARGET_CHANNELS]
    const unsigned char* mask;  // [height, stride], if MASKED
    float background[3];

    __device__ bool inside(int x, int y) const { return x >= 0 && y >= 0 && x < width && y < height; }
    __device__ bool keeps(int x, int y) const { return !MASKED || mask[static_cast<long long>(y) * stride + x]; }
    // Whether the window around a pixel is averaged.
    __device__ bool has_window(int x, int y) const {
        return inside(x - MARGIN, y - MARGIN) && inside(x + MARGIN, y + MARGIN) && keeps(x, y);
    }
    __device__ float composed(int x, int y, int c) const {  // before clamping
        const long long pixel = static_cast<long long>(y) * stride + x;
        return fmaf(transmittance[pixel], background[c], rgb[3 * pixel + c]);
    }
    __device__ float photo(int x, int y, int c) const {
        const long long first = (static_cast<long long>(y) * stride + x) * TARGET_CHANNELS;
        const auto read = [&](int channel) {
            if (TARGET_BYTES) return static_cast<const unsigned char*>(target)[first + channel] * (1.0f / 255.0f);
            return static_cast<const float*>(target)[first + channel];
        };
        if (TARGET_CHANNELS == 3) return read(c);
        return fmaf(read(c), read(3), (1.0f - read(3)) * background[c]);
    }
};

// A block's view and the first pixel of its part.
struct Part {
    View view;
    int index, x, y;
    bool first_of_view;
};

__device__ inline Part part_of_block(const float* rgb, const float* transmittance, const unsigned char* target,
                                     const unsigned char* mask, const float* background, const int* sizes, int width, int height) {
    const int columns = (width + SIDE - 1) / SIDE, blocks = columns * ((height + SIDE - 1) / SIDE);
    Part part;
    part.index = blockIdx.x / blocks;
    const int block = blockIdx.x % blocks;
    part.first_of_view = block == 0;
    part.x = block % columns * SIDE, part.y = block / columns * SIDE;
    const long long pixels = static_cast<long long>(part.index) * height * width;
    const int bytes = TARGET_CHANNELS * (TARGET_BYTES ? 1 : 4);
    part.view = {sizes[2 * part.index], sizes[2 * part.index + 1], width, rgb + 3 * pixels, transmittance + pixels,
                 target + pixels * bytes, MASKED ? mask + pixels : nullptr,
                 {background[3 * part.index], background[3 * part.index + 1], background[3 * part.index + 2]}};
    return part;
}

// How many pixels and windows a view averages over. counts: [V, 2] of the masks, if MASKED.
__device__ inline void read_counts(const View& view, int index, const unsigned long long* counts, float& pixels, float& windows) {
    const int across = view.width - 2 * MARGIN, down = view.height - 2 * MARGIN;
    pixels = MASKED ? counts[2 * index] : static_cast<float>(view.width) * view.height;
    windows = MASKED ? counts[2 * index + 1] : across > 0 && down > 0 ? static_cast<float>(across) * down : 0.0f;
}

__device__ inline float filter(const float* values, int first) {
    float sum = 0.0f;
#pragma unroll
    for (int tap = 0; tap < SSIM_TAPS; ++tap) sum = fmaf(ssim_weight(tap), values[first + tap], sum);
    return sum;
}

__device__ inline float sum_of_block(float value) {
    __shared__ float sums[THREADS / WARP];
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < THREADS / WARP; ++warp) sum += sums[warp];
    __syncthreads();
    return sum;
}

// Kept pixels and windows of each view. counts: [V, 2] zero. One block a row of a view, THREADS pixels at a time.
extern "C" __global__ void __launch_bounds__(THREADS)
count_kept(const unsigned char* __restrict__ mask,  // [V, H, W]
           const int* __restrict__ sizes,           // [V, 2] width, height
           int width, int height,
           unsigned long long* counts) {
    const int index = blockIdx.x / height, y = blockIdx.x % height;
    View view = {};
    view.width = sizes[2 * index], view.height = sizes[2 * index + 1], view.stride = width;
    view.mask = mask + static_cast<long long>(index) * height * width;
    float pixels = 0.0f, windows = 0.0f;
    for (int x = threadIdx.x; x < view.width && y < view.height; x += THREADS) {
        pixels += view.keeps(x, y);
        windows += view.has_window(x, y);
    }
    pixels = sum_of_block(pixels), windows = sum_of_block(windows);
    if (threadIdx.x > 0) return;
    atomicAdd(counts + 2 * index, static_cast<unsigned long long>(pixels));
    atomicAdd(counts + 2 * index + 1, static_cast<unsigned long long>(windows));
}

// Sums of |image - photo| over pixels and of SSIM over windows, channels added up, and the derivatives of SSIM.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
photometric_terms(const float* __restrict__ rgb,             // [V, H, W, 3]
                  const float* __restrict__ transmittance,   // [V, H, W]
                  const unsigned char* __restrict__ target,  // [V, H, W, TARGET_CHANNELS], bytes or floats
                  const unsigned char* __restrict__ mask,    // [V, H, W], if MASKED
                  const float* __restrict__ background,      // [V, 3]
                  const int* __restrict__ sizes,             // [V, 2] width, height
                  int width, int height,
                  double* sums,                      // [V, 2] zero
                  float* __restrict__ derivatives,   // [V, 3 channels, 3 terms, H, W]; zero where there is no window
                  const long long* state) {  // or null
    if (state && step_state(state).halted) return;
    __shared__ __align__(16) float image[HALO * PITCH], photo[HALO * PITCH];
    __shared__ __align__(16) float means[5][HALO][SIDE];  // filtered along rows: x, y, x^2, y^2, x y
    const Part part = part_of_block(rgb, transmittance, target, mask, background, sizes, width, height);
    const View& view = part.view;
    float difference = 0.0f, similarity = 0.0f;
    for (int c = 0; c < 3; ++c) {
        // Phase 1: both images, masked pixels and what is outside as zero.
        for (int i = threadIdx.x; i < HALO * PITCH; i += THREADS) {
            const int x = part.x + i % PITCH - MARGIN, y = part.y + i / PITCH - MARGIN;
            const bool counts = view.inside(x, y) && view.keeps(x, y);
            const float composed = counts ? clamp(view.composed(x, y, c), 0.0f, 1.0f) : 0.0f;
            const float wanted = counts ? view.photo(x, y, c) : 0.0f;
            image[i] = composed, photo[i] = wanted;
            const bool own = x >= part.x && x < part.x + SIDE && y >= part.y && y < part.y + SIDE;
            if (own) difference += fabsf(composed - wanted);
        }
        __syncthreads();
        // Phase 2: along rows.
        for (int i = threadIdx.x; i < HALO * (SIDE / RUN); i += THREADS) {
            const int row = i / (SIDE / RUN), first = i % (SIDE / RUN) * RUN;
            float x[RUN + SSIM_TAPS + 1], y[RUN + SSIM_TAPS + 1], product[RUN + SSIM_TAPS - 1];
#pragma unroll
            for (int v = 0; v < (RUN + SSIM_TAPS + 1) / 4; ++v) {
                const float4 four_x = *reinterpret_cast<const float4*>(&image[row * PITCH + first + 4 * v]);
                const float4 four_y = *reinterpret_cast<const float4*>(&photo[row * PITCH + first + 4 * v]);
                x[4 * v] = four_x.x, x[4 * v + 1] = four_x.y, x[4 * v + 2] = four_x.z, x[4 * v + 3] = four_x.w;
                y[4 * v] = four_y.x, y[4 * v + 1] = four_y.y, y[4 * v + 2] = four_y.z, y[4 * v + 3] = four_y.w;
            }
            const auto put = [&](int term, const float* values) {
                *reinterpret_cast<float4*>(&means[term][row][first]) =
                    make_float4(filter(values, 0), filter(values, 1), filter(values, 2), filter(values, 3));
            };
            put(0, x);
            put(1, y);
#pragma unroll
            for (int k = 0; k < RUN + SSIM_TAPS - 1; ++k) product[k] = x[k] * y[k];
            put(4, product);
#pragma unroll
            for (int k = 0; k < RUN + SSIM_TAPS - 1; ++k) product[k] = x[k] * x[k];
            put(2, product);
#pragma unroll
            for (int k = 0; k < RUN + SSIM_TAPS - 1; ++k) product[k] = y[k] * y[k];
            put(3, product);
        }
        __syncthreads();
        // Phase 3: along columns, and the windows.
        const int column = threadIdx.x % SIDE, first = threadIdx.x / SIDE * RUN;
        float mean[5][RUN];
#pragma unroll
        for (int term = 0; term < 5; ++term) {
            float values[RUN + SSIM_TAPS - 1];
#pragma unroll
            for (int k = 0; k < RUN + SSIM_TAPS - 1; ++k) values[k] = means[term][first + k][column];
#pragma unroll
            for (int k = 0; k < RUN; ++k) mean[term][k] = filter(values, k);
        }
        const long long plane = static_cast<long long>(height) * width;
        float* out = derivatives + (part.index * 3ll + c) * 3 * plane;
        const int x = part.x + column;
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const int y = part.y + first + k;
            if (x >= width || y >= height) continue;
            Ssim<float> window = {0.0f, 0.0f, 0.0f, 0.0f};
            if (view.has_window(x, y)) window = ssim(mean[0][k], mean[1][k], mean[2][k], mean[3][k], mean[4][k]);
            similarity += window.value;
            const long long pixel = static_cast<long long>(y) * width + x;
            out[pixel] = window.d_mean, out[plane + pixel] = window.d_square, out[2 * plane + pixel] = window.d_product;
        }
        __syncthreads();
    }
    const float differences = sum_of_block(difference), similarities = sum_of_block(similarity);
    if (threadIdx.x == 0) {
        atomicAdd(sums + 2 * part.index, static_cast<double>(differences));
        atomicAdd(sums + 2 * part.index + 1, static_cast<double>(similarities));
    }
}

// The views' losses and their gradients.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
photometric_gradient(const float* __restrict__ rgb,             // [V, H, W, 3]
                     const float* __restrict__ transmittance,   // [V, H, W]
                     const unsigned char* __restrict__ target,  // [V, H, W, TARGET_CHANNELS], bytes or floats
                     const unsigned char* __restrict__ mask,    // [V, H, W], if MASKED
                     const float* __restrict__ background,      // [V, 3]
                     const int* __restrict__ sizes,             // [V, 2] width, height
                     int width, int height,
                     float lambda,
                     const unsigned long long* __restrict__ counts,  // [V, 2], if MASKED
                     const double* __restrict__ sums,                // [V, 2]
                     const float* __restrict__ derivatives,          // [V, 3 channels, 3 terms, H, W]
                     float* __restrict__ values,           // [V]
                     float* __restrict__ d_rgb,            // [V, H, W, 3]
                     float* __restrict__ d_transmittance,  // [V, H, W]
                     const long long* state) {  // or null
    if (state && step_state(state).halted) return;
    __shared__ __align__(16) float source[HALO * PITCH];
    __shared__ __align__(16) float rows[HALO][SIDE];
    const Part part = part_of_block(rgb, transmittance, target, mask, background, sizes, width, height);
    const View& view = part.view;
    float pixels, windows;
    read_counts(view, part.index, counts, pixels, windows);
    if (part.first_of_view && threadIdx.x == 0) {
        const double l1 = pixels > 0 ? sums[2 * part.index] / (3.0 * pixels) : 0.0;
        const double dssim = windows > 0 ? 1.0 - sums[2 * part.index + 1] / (3.0 * windows) : 0.0;
        values[part.index] = static_cast<float>((1.0 - lambda) * l1 + lambda * dssim);
    }
    const float l1_scale = pixels > 0 ? (1.0f - lambda) / (3.0f * pixels) : 0.0f;
    const float ssim_scale = windows > 0 ? -lambda / (3.0f * windows) : 0.0f;

    const int column = threadIdx.x % SIDE, first_row = threadIdx.x / SIDE * RUN;
    const int x = part.x + column;
    float gradient[RUN][3];
#pragma unroll
    for (int c = 0; c < 3; ++c) {
        float spread[3][RUN];
#pragma unroll
        for (int term = 0; term < 3; ++term) {
            const float* plane = derivatives + ((part.index * 3ll + c) * 3 + term) * height * width;
            for (int i = threadIdx.x; i < HALO * PITCH; i += THREADS) {
                const int px = part.x + i % PITCH - MARGIN, py = part.y + i / PITCH - MARGIN;
                source[i] = view.inside(px, py) ? plane[static_cast<long long>(py) * width + px] : 0.0f;
            }
            __syncthreads();
            for (int i = threadIdx.x; i < HALO * (SIDE / RUN); i += THREADS) {
                const int row = i / (SIDE / RUN), first = i % (SIDE / RUN) * RUN;
                float v[RUN + SSIM_TAPS + 1];
#pragma unroll
                for (int k = 0; k < (RUN + SSIM_TAPS + 1) / 4; ++k) {
                    const float4 four = *reinterpret_cast<const float4*>(&source[row * PITCH + first + 4 * k]);
                    v[4 * k] = four.x, v[4 * k + 1] = four.y, v[4 * k + 2] = four.z, v[4 * k + 3] = four.w;
                }
                *reinterpret_cast<float4*>(&rows[row][first]) =
                    make_float4(filter(v, 0), filter(v, 1), filter(v, 2), filter(v, 3));
            }
            __syncthreads();
            float v[RUN + SSIM_TAPS - 1];
#pragma unroll
            for (int k = 0; k < RUN + SSIM_TAPS - 1; ++k) v[k] = rows[first_row + k][column];
#pragma unroll
            for (int k = 0; k < RUN; ++k) spread[term][k] = filter(v, k);
        }
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const int y = part.y + first_row + k;
            gradient[k][c] = 0.0f;
            if (!view.inside(x, y) || !view.keeps(x, y)) continue;
            const float unclamped = view.composed(x, y, c), wanted = view.photo(x, y, c);
            if (!(unclamped >= 0.0f && unclamped <= 1.0f)) continue;
            const float sign = unclamped > wanted ? 1.0f : unclamped < wanted ? -1.0f : 0.0f;
            gradient[k][c] = fmaf(l1_scale, sign,
                                  ssim_scale * (spread[0][k] + 2.0f * unclamped * spread[1][k] + wanted * spread[2][k]));
        }
    }
#pragma unroll
    for (int k = 0; k < RUN; ++k) {
        const int y = part.y + first_row + k;
        if (x >= width || y >= height) continue;
        const long long pixel = (static_cast<long long>(part.index) * height + y) * width + x;
        float through = 0.0f;
        for (int c = 0; c < 3; ++c) {
            d_rgb[3 * pixel + c] = gradient[k][c];
            through = fmaf(gradient[k][c], view.background[c], through);
        }
        d_transmittance[pixel] = through;
    }
}
