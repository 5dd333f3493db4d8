// The photometric loss of each view, (1 - lambda) L1 + lambda (1 - SSIM), and its gradient (ssim.h).
//
// photometric_terms forms the sums of both terms and, for each window, the derivatives of its SSIM;
// photometric_gradient spreads these back over the windows' pixels. Both filter 32 x 32 pixels a block, first along
// rows, then along columns; a thread makes four neighbouring outputs, so that it reads each input once and not eleven
// times.
//
// Compile-time: TARGET_CHANNELS (3, 4), TARGET_BYTES (0: float, 1: uint8), MASKED (0, 1).
#include "photo.h"
#include "step.h"

using namespace bytesplat;

constexpr int SIDE = 32;  // of a block's part of the image
constexpr int HALO = SIDE + 2 * MARGIN;
constexpr int PITCH = HALO + 2;  // a multiple of four floats
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
// As many as shared memory has room for, or almost: registers must not be the limit.
constexpr int BLOCKS_OF_MULTIPROCESSOR = TARGET_CHANNELS == 3 ? 4 : 2;

// A block's view and the first pixel of its part.
struct Part {
    View view;
    int index, x, y;
    bool first_of_view;
};

__device__ inline Part part_of_block(const float* rgb, const float* transmittance, const unsigned char* target,
                                     const unsigned char* mask, const float* background, const int* sizes, int width,
                                     int height) {
    const int columns = (width + SIDE - 1) / SIDE, blocks = columns * ((height + SIDE - 1) / SIDE);
    Part part;
    part.index = blockIdx.x / blocks;
    const int block = blockIdx.x % blocks;
    part.first_of_view = block == 0;
    part.x = block % columns * SIDE, part.y = block / columns * SIDE;
    const long long first = static_cast<long long>(part.index) * height * width;
    part.view = {sizes[2 * part.index], sizes[2 * part.index + 1], width, first, rgb, transmittance, target, mask,
                 background + 3 * part.index};
    return part;
}

// The inputs of four outputs along a row, the first one aligned to four floats.
__device__ inline void read_row(const float* source, float values[INPUTS]) {
#pragma unroll
    for (int v = 0; v < INPUTS; v += 4) {
        const float4 four = *reinterpret_cast<const float4*>(source + v);
        values[v] = four.x, values[v + 1] = four.y;
        if (v + 2 < INPUTS) values[v + 2] = four.z, values[v + 3] = four.w;
    }
}
__device__ inline void read_column(const float (*source)[SIDE], float values[INPUTS]) {
#pragma unroll
    for (int k = 0; k < INPUTS; ++k) values[k] = source[k][threadIdx.x % SIDE];
}

// Calls visit(column, row, x, y, inside) for each pixel of the part with its margin; a warp goes along a row.
template <class Visit> __device__ inline void for_each_pixel(const Part& part, Visit visit) {
    for (int row = threadIdx.x / WARP; row < HALO; row += WARPS) {
        const int y = part.y + row - MARGIN;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = threadIdx.x % WARP + half * WARP, x = part.x + column - MARGIN;
            if (column < HALO) visit(column, row, x, y, part.view.inside(x, y));
        }
    }
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
    view.first = static_cast<long long>(index) * height * width;
    view.mask = mask;
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
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_MULTIPROCESSOR)
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
    __shared__ __align__(16) float images[2][HALO * PITCH];  // ours and the photo
    __shared__ __align__(16) float means[5][HALO][SIDE];     // filtered along rows: x, y, x^2, y^2, x y
    const Part part = part_of_block(rgb, transmittance, target, mask, background, sizes, width, height);
    const View& view = part.view;
    float difference = 0.0f, similarity = 0.0f;
    for (int c = 0; c < 3; ++c) {
        // Phase 1: both images, masked pixels and what is outside as zero.
        for_each_pixel(part, [&](int column, int row, int x, int y, bool inside) {
            const bool counts = inside && view.keeps(x, y);
            const float ours = counts ? __saturatef(view.composed(x, y, c)) : 0.0f;
            const float wanted = counts ? view.photo(x, y, c) : 0.0f;
            images[0][row * PITCH + column] = ours, images[1][row * PITCH + column] = wanted;
            const bool own = column >= MARGIN && column < MARGIN + SIDE && row >= MARGIN && row < MARGIN + SIDE;
            if (own) difference += fabsf(ours - wanted);
        });
        __syncthreads();
        // Phase 2: along rows. A third of the threads each: ours and its square, the photo and its square, the product.
        constexpr int RUNS = HALO * (SIDE / RUN);
        for (int i = threadIdx.x; i < 3 * RUNS; i += THREADS) {
            const int what = i / RUNS, run = i % RUNS, row = run / (SIDE / RUN), first = run % (SIDE / RUN) * RUN;
            float values[INPUTS], others[INPUTS];
            read_row(&images[what == 1][row * PITCH + first], values);
            const auto put = [&](int term) { *reinterpret_cast<float4*>(&means[term][row][first]) = filter(values); };
            if (what < 2) put(what);
            if (what == 2) read_row(&images[1][row * PITCH + first], others);
#pragma unroll
            for (int k = 0; k < INPUTS; ++k) values[k] *= what == 2 ? others[k] : values[k];
            put(2 + what);
        }
        __syncthreads();
        // Phase 3: along columns, and the windows.
        const int first = threadIdx.x / SIDE * RUN, x = part.x + threadIdx.x % SIDE;
        float4 mean[5];
#pragma unroll
        for (int term = 0; term < 5; ++term) {
            float values[INPUTS];
            read_column(&means[term][first], values);
            mean[term] = filter(values);
        }
        const long long plane = static_cast<long long>(height) * width;
        float* out = derivatives + (part.index * 3ll + c) * 3 * plane;
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const int y = part.y + first + k;
            if (x >= width || y >= height) continue;
            const auto of = [&](int term) { return (&mean[term].x)[k]; };
            Ssim<float> window = {0.0f, 0.0f, 0.0f, 0.0f};
            if (view.has_window(x, y)) window = ssim(of(0), of(1), of(2), of(3), of(4));
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
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_MULTIPROCESSOR)
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
    __shared__ __align__(16) float terms[3][HALO * PITCH];
    __shared__ __align__(16) float rows[3][HALO][SIDE];  // filtered along rows
    const Part part = part_of_block(rgb, transmittance, target, mask, background, sizes, width, height);
    const View& view = part.view;
    float pixels, windows;
    read_counts(view, part.index, counts, pixels, windows);
    if (part.first_of_view && threadIdx.x == 0)
        values[part.index] =
            photometric_value(sums[2 * part.index], sums[2 * part.index + 1], pixels, windows, lambda);
    const float l1_scale = l1_scale_of(pixels, lambda), ssim_scale = ssim_scale_of(windows, lambda);

    const int first_row = threadIdx.x / SIDE * RUN, x = part.x + threadIdx.x % SIDE;
    const long long plane = static_cast<long long>(height) * width;
    float through[RUN] = {};
#pragma unroll 1
    for (int c = 0; c < 3; ++c) {
        const float* source = derivatives + (part.index * 3ll + c) * 3 * plane;
        for_each_pixel(part, [&](int column, int row, int px, int py, bool inside) {
            const float* of_pixel = source + static_cast<long long>(py) * width + px;
            for (int term = 0; term < 3; ++term)
                terms[term][row * PITCH + column] = inside ? of_pixel[term * plane] : 0.0f;
        });
        __syncthreads();
        constexpr int RUNS = HALO * (SIDE / RUN);
        for (int i = threadIdx.x; i < 3 * RUNS; i += THREADS) {
            const int term = i / RUNS, run = i % RUNS, row = run / (SIDE / RUN), first = run % (SIDE / RUN) * RUN;
            float values[INPUTS];
            read_row(&terms[term][row * PITCH + first], values);
            *reinterpret_cast<float4*>(&rows[term][row][first]) = filter(values);
        }
        __syncthreads();
        float4 spread[3];
#pragma unroll
        for (int term = 0; term < 3; ++term) {
            float values[INPUTS];
            read_column(&rows[term][first_row], values);
            spread[term] = filter(values);
        }
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const int y = part.y + first_row + k;
            if (x >= width || y >= height) continue;
            float gradient = 0.0f;
            if (view.inside(x, y) && view.keeps(x, y)) {
                const auto of = [&](int term) { return (&spread[term].x)[k]; };
                gradient = photometric_gradient_at(view.composed(x, y, c), view.photo(x, y, c), of(0), of(1), of(2),
                                                   l1_scale, ssim_scale);
            }
            d_rgb[3 * view.pixel(x, y) + c] = gradient;
            through[k] = fmaf(gradient, view.background[c], through[k]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < RUN; ++k) {
        const int y = part.y + first_row + k;
        if (x < width && y < height) d_transmittance[view.pixel(x, y)] = through[k];
    }
}
