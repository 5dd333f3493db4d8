// Derivative of rasterization, front to back in the order of the forward pass; see raster.h and blend.h.
//
// What a record's mean, conic and opacity receive are six moments of p = dL/d(power) over pixels: sum of p, p x, p y, p x^2,
// p x y and p y^2, with x, y relative to a strip's centre; its colour receives sums of w = alpha T times the pixels'
// gradients. Sums over pixels with weights that depend on the pixel alone are a matrix product, so the tensor cores form
// them: of 8 records at a time, rows 0 to 7 of A hold p and rows 8 to 15 hold w, columns are pixels, and B holds the
// weights. Shared memory turns "a lane is a pixel" into "a lane is a record"; then each lane adds four floats to a row.
//
// The weights of the moments are small multiples of 1/4, exact in tf32 and bf16. SPLIT says how exact p and w are:
//   0: rounded to tf32 (11 bits);   1: as a sum of two bf16 (16 bits), at the same cost on the tensor cores.
// The pixels' gradients are a sum of two terms either way, in columns 2c and 2c + 1 for red, green, blue and depth.
//
// Compile-time: WARPS, STATISTICS (0, 1), DEPTH_GRADIENT (0, 1), SPLIT (0, 1) and those of raster.h.
#include "raster.h"

using namespace bytesplat;

constexpr int GROUP = 8;                        // records reduced together
constexpr int STRIP_PIXELS = 32;                // columns of A for a strip
constexpr int STEPS = STRIP_PIXELS / 8;         // products of a strip and group
constexpr int ROW = STATISTICS ? ROW_STRIDE_WITH_STATISTICS : ROW_STRIDE;

// The upper and lower part of a number, each exact in the matrix format but for the last bits of the lower one.
__device__ inline float upper_part(float x) { return __uint_as_float(__float_as_uint(x) & (SPLIT ? 0xffff0000u : 0xffffe000u)); }

// A word of A.
__device__ inline unsigned element(float x) {
    if (!SPLIT) return round_tf32(x);
    const float upper = upper_part(x);
    return pack_bf16(upper, x - upper);
}
// A word of B: with SPLIT it multiplies both parts of A's word.
__device__ inline unsigned weight_element(float x) { return SPLIT ? pack_bf16(x, x) : __float_as_uint(x); }

__device__ inline void multiply(float d[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    if (SPLIT) multiply_bf16(d, a0, a1, a2, a3, b0, b1);
    else multiply_tf32(d, a0, a1, a2, a3, b0, b1);
}

// Rows of A of one strip. Pixel 16 q + l, l being the lane in the strip, is column 8 step + t + 4 h with
// t = pixel / 4 % 4, step = 2 q + pixel / 2 % 2, h = pixel % 2: then a lane finds what it feeds to two products in one
// float4. The swizzle by 16 words keeps rows and strips that are accessed together on different banks.
struct Rows {
    unsigned p[2][GROUP][STRIP_PIXELS], w[2][GROUP][STRIP_PIXELS];
#if STATISTICS
    unsigned x[2][GROUP][STRIP_LANES], y[2][GROUP][STRIP_LANES];  // |d mean2d| of a lane's pixels
#endif
};

__device__ inline uint4 four(const unsigned* words) { return *reinterpret_cast<const uint4*>(words); }
__device__ inline unsigned largest(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// Reduces the group of one strip and adds it to the records' gradient rows. The whole warp calls it: lane (g, t) has record
// g of the group and gathers row columns 4t to 4t + 3.
__device__ inline void add_group(const Rows& rows, int strip, int index, const Stage& stage, const int* record,
                                 const unsigned (*moment)[2], const uint4* colour_weights, float strip_y, float* gradient_rows) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    float moments[4] = {}, colours[4] = {};
    unsigned peak = 0;
#pragma unroll
    for (int half = 0; half < STEPS / 2; ++half) {
        const int column = (16 * half + 4 * t) ^ (16 * ((g ^ strip) & 1));
        const uint4 p = four(&rows.p[strip][g][column]), w = four(&rows.w[strip][g][column]);
        const uint4 c = colour_weights[half * WARP + lane];
        multiply(moments, p.x, w.x, p.y, w.y, moment[2 * half][0], moment[2 * half][1]);
        multiply(colours, p.x, w.x, p.y, w.y, c.x, c.y);
        multiply(moments, p.z, w.z, p.w, w.w, moment[2 * half + 1][0], moment[2 * half + 1][1]);
        multiply(colours, p.z, w.z, p.w, w.w, c.z, c.w);
        if (STATISTICS) peak = max(peak, largest(w));  // w >= 0: its words order as it does
    }
    // Columns 2t and 2t + 1 of rows g (moments) and g + 8 (colours).
    const float s = __shfl_sync(ALL_LANES, moments[0], lane & ~3), sx = __shfl_sync(ALL_LANES, moments[1], lane & ~3);
    const float sy = __shfl_sync(ALL_LANES, moments[0], (lane & ~3) + 1);
    const float sxx = __shfl_sync(ALL_LANES, moments[1], (lane & ~3) + 1);
    const float sxy = __shfl_sync(ALL_LANES, moments[0], (lane & ~3) + 2);
    const float syy = __shfl_sync(ALL_LANES, moments[1], (lane & ~3) + 2);
    const float sum = colours[2] + colours[3];
    const float red = __shfl_sync(ALL_LANES, sum, lane & ~3), green = __shfl_sync(ALL_LANES, sum, (lane & ~3) + 1);
    const float blue = __shfl_sync(ALL_LANES, sum, (lane & ~3) + 2), depth = __shfl_sync(ALL_LANES, sum, (lane & ~3) + 3);
    const float importance = __shfl_sync(ALL_LANES, moments[2], lane & ~3);  // the zeroth moment of w
    float absolute[4] = {};
    if (STATISTICS) {
#if STATISTICS
        const uint4 x = four(&rows.x[strip][g ^ strip][4 * t]), y = four(&rows.y[strip][g ^ strip][4 * t]);
        const unsigned one = weight_element(1.0f);
        multiply(absolute, x.x, y.x, x.y, y.y, one, one);
        multiply(absolute, x.z, y.z, x.w, y.w, one, one);
        peak = max(peak, __shfl_xor_sync(ALL_LANES, peak, 1));
        peak = max(peak, __shfl_xor_sync(ALL_LANES, peak, 2));
#endif
    }
    if (index == FAINT) return;

    const float4 shape = stage.shape[index], colour = stage.colour[index];
    const float ux = shape.x, uy = shape.y - strip_y;
    const float a = shape.z * (-2.0f / LOG2_E), b = shape.w * (-1.0f / LOG2_E), c = colour.x * (-2.0f / LOG2_E);
    const float dx = fmaf(ux, s, -sx), dy = fmaf(uy, s, -sy);  // sums of p times the offset from pixel to mean
    const float dxx = fmaf(ux, dx - sx, sxx), dyy = fmaf(uy, dy - sy, syy);
    const float dxy = fmaf(ux, dy, fmaf(-uy, sx, sxy));
    float* row = gradient_rows + static_cast<long long>(record[index]) * ROW;
    if (t == 0) add_vector(row, -fmaf(a, dx, b * dy), -fmaf(b, dx, c * dy), -0.5f * dxx, -dxy);
    if (t == 1) add_vector(row + 4, -0.5f * dyy, s * exp2_fast(-colour.y), red, green);
    constexpr float LN_2 = 1.0f / LOG2_E;
    if (t == 2) add_vector(row + 8, blue, depth, LN_2 * absolute[0], LN_2 * absolute[2]);
    if (STATISTICS && t == 3) {
        const float value = SPLIT ? __uint_as_float(peak & 0xffff0000u) + __uint_as_float(peak << 16) : __uint_as_float(peak);
        atomicAdd(row + IMPORTANCE, importance);
        atomicMax(reinterpret_cast<unsigned*>(row + MAX_CONTRIBUTION), __float_as_uint(value));
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
rasterize_backward(const float* __restrict__ table,        // [M, RECORD_STRIDE]
                   const int* __restrict__ records,        // [P] tile lists
                   const long long* __restrict__ offsets,  // [tiles + 1]
                   const int* __restrict__ sizes,          // [V, 2] width, height
                   int width, int height,                  // of the stored images
                   int tiles_x, int tiles_y, int tiles,
                   const float* __restrict__ interval,         // [V, H, W, 2] depths, if INTERVAL
                   const float* __restrict__ rgb,              // [V, H, W, 3] as rasterized
                   const float* __restrict__ depth,            // [V, H, W]
                   const float* __restrict__ transmittance,    // [V, H, W]
                   const float* __restrict__ d_rgb,            // [V, H, W, 3] dL/d(rgb)
                   const float* __restrict__ d_depth,          // [V, H, W], if DEPTH_GRADIENT
                   const float* __restrict__ d_transmittance,  // [V, H, W] or null
                   float* __restrict__ gradient_rows,          // [M, ROW] zero
                   const long long* state) {
    if (step_state(state).halted) return;
    __shared__ Stage stages[WARPS];
    __shared__ int stage_records_of[WARPS][WARP + 1];
    __shared__ __align__(16) Rows all_rows[WARPS];
    __shared__ uint4 all_weights[WARPS][2][STEPS / 2 * WARP];
    const int in_block = threadIdx.x / WARP, lane = threadIdx.x % WARP, strip = lane / STRIP_LANES;
    const long long warp = static_cast<long long>(blockIdx.x) * WARPS + in_block;
    if (warp / QUADRANTS >= tiles) return;
    Stage& stage = stages[in_block];
    int* record = stage_records_of[in_block];
    Rows& rows = all_rows[in_block];
    const Region region = region_of_warp(warp, tiles_x, tiles_y);
    const long long end = offsets[region.tile + 1];
    long long first = offsets[region.tile];
    if (first == end) return;
    const float strip_y = 4.0f * strip - 2.0f;  // of the strip, relative to the centre of the 8 x 8 pixels
    const float centred_y = region.local_y + strip_y;
    Fetched fetched = fetch_record(table, records, first + lane, end);

    // Phase 1: the pixels' gradients. `rest` is what this and all records behind still add to the differentiated scalar.
    float running[PIXELS], rest[PIXELS], gr[PIXELS], gg[PIXELS], gb[PIXELS], gz[PIXELS];
    float2 bounds[PIXELS];
#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        const int y = region.y + 2 * q;
        running[q] = rest[q] = gr[q] = gg[q] = gb[q] = gz[q] = 0.0f;
        bounds[q] = make_float2(0.0f, 0.0f);
        if (region.x < sizes[2 * region.view] && y < sizes[2 * region.view + 1]) {
            const long long pixel = (static_cast<long long>(region.view) * height + y) * width + region.x;
            running[q] = 1.0f;
            gr[q] = d_rgb[3 * pixel], gg[q] = d_rgb[3 * pixel + 1], gb[q] = d_rgb[3 * pixel + 2];
            rest[q] = fmaf(rgb[3 * pixel], gr[q], fmaf(rgb[3 * pixel + 1], gg[q], rgb[3 * pixel + 2] * gb[q]));
            if (d_transmittance) rest[q] = fmaf(transmittance[pixel], d_transmittance[pixel], rest[q]);
            if (DEPTH_GRADIENT) {
                gz[q] = d_depth[pixel];
                rest[q] = fmaf(depth[pixel], gz[q], rest[q]);
            }
            if (INTERVAL) bounds[q] = reinterpret_cast<const float2*>(interval)[pixel];
        }
    }

    // Phase 2: B. Lane (g, t) holds column g of the pixels that are rows t and t + 4 of each product.
    const int g = lane / 4, t = lane % 4;
    unsigned moment[STEPS][2];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int pixel = 4 * t + 2 * (step & 1) + h;  // its lane in the strip; step / 2 is its q
            const float x = pixel % 8 - 3.5f, y = pixel / 8 + 2 * (step / 2) - 1.5f;
            const float weight = g == 0 ? 1.0f : g == 1 ? x : g == 2 ? y : g == 3 ? x * x : g == 4 ? x * y : g == 5 ? y * y : 0.0f;
            moment[step][h] = weight_element(weight);
        }
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int q = 0; q < PIXELS; ++q) {
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int source = s * STRIP_LANES + 4 * t + j;
                const float red = __shfl_sync(ALL_LANES, gr[q], source), green = __shfl_sync(ALL_LANES, gg[q], source);
                const float blue = __shfl_sync(ALL_LANES, gb[q], source), far = __shfl_sync(ALL_LANES, gz[q], source);
                const float value = g < 2 ? red : g < 4 ? green : g < 6 ? blue : far, upper = upper_part(value);
                words[j] = weight_element(g % 2 ? value - upper : upper);
            }
            all_weights[in_block][s][q * WARP + lane] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    stage_faint_record(stage);

    while (first < end) {
        const bool live = running[0] > TRANSMITTANCE_MIN || running[1] > TRANSMITTANCE_MIN;
        if (!__any_sync(ALL_LANES, live)) break;
        const int length = stage_records(stage, fetched, region, GROUP);
        record[lane] = fetched.index;
        first += WARP;
        fetched = fetch_record(table, records, first + lane, end);  // on its way while these are blended
        for (int k = 0; k < length; k += GROUP) {
            // Phase 3: p and w of 8 records at the lane's pixels.
#pragma unroll
            for (int first_of = 0; first_of < GROUP; first_of += UNROLL) {
                float opacity[UNROLL][PIXELS];
                float4 shape[UNROLL], colour[UNROLL];
                float2 tail[UNROLL];
                Column column[UNROLL];
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const int index = stage.list[strip][k + first_of + u];
                    shape[u] = stage.shape[index], colour[u] = stage.colour[index], tail[u] = stage.tail[index];
                    column[u] = column_of(shape[u], colour[u], region.local_x, centred_y);
#pragma unroll
                    for (int q = 0; q < PIXELS; ++q) opacity[u][q] = exp2_fast(power_at(column[u], q));
                }
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const int row = first_of + u;
                    float absolute_x = 0.0f, absolute_y = 0.0f;
#pragma unroll
                    for (int q = 0; q < PIXELS; ++q) {
                        const float alpha = fminf(opacity[u][q], ALPHA_MAX);
                        const float before = running[q], weight = alpha * before, behind = fmaf(-alpha, before, before);
                        const bool taken = takes(alpha, tail[u].y, bounds[q]);
                        const bool blended = taken && blends(before, behind);
                        float scalar = fmaf(colour[u].z, gr[q], fmaf(colour[u].w, gg[q], tail[u].x * gb[q]));
                        if (DEPTH_GRADIENT) scalar = fmaf(tail[u].y, gz[q], scalar);
                        const float left = fmaf(-weight, scalar, rest[q]);
                        // alpha dL/dalpha = alpha (T s - R / (1 - alpha)) = w (s - R / (T (1 - alpha)))
                        float p = weight * fmaf(-left, reciprocal_fast(behind), scalar);
                        if (!(blended && opacity[u][q] <= ALPHA_MAX)) p = 0.0f;
                        if (blended) rest[q] = left;
                        if (taken) running[q] = behind;
                        const int word = (lane % STRIP_LANES + 16 * q) ^ (16 * ((row ^ strip) & 1));
                        rows.p[strip][row][word] = element(p);
                        rows.w[strip][row][word] = element(blended ? weight : 0.0f);
                        if (STATISTICS) {  // in units of power: a factor of ln 2 is left for later
                            const float dy = column[u].dy - 2.0f * q;
                            absolute_x += fabsf(p * fmaf(shape[u].w, dy, 2.0f * shape[u].z * column[u].dx));
                            absolute_y += fabsf(p * fmaf(2.0f * colour[u].x, dy, column[u].slope));
                        }
                    }
#if STATISTICS
                    rows.x[strip][row ^ strip][lane % STRIP_LANES] = element(absolute_x);
                    rows.y[strip][row ^ strip][lane % STRIP_LANES] = element(absolute_y);
#endif
                }
            }
            __syncwarp();
            // Phase 4: their sums over the pixels of each strip.
#pragma unroll
            for (int s = 0; s < 2; ++s)
                add_group(rows, s, stage.list[s][k + g], stage, record, moment, all_weights[in_block][s], 4.0f * s - 2.0f,
                          gradient_rows);
            __syncwarp();
        }
    }
}
