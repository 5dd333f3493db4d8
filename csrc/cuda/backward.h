// How a warp forms the gradient rows of the records of its square, front to back in the order of the forward pass; see
// raster.h and blend.h.
//
// What a record's mean, conic and opacity receive are six moments of p = dL/d(power) over pixels: sum of p, p x, p y,
// p x^2, p x y and p y^2, with x, y relative to the centre of the warp's square; its colour receives sums of w =
// alpha T times the pixels' gradients. Sums over pixels with weights that depend on the pixel alone are a matrix
// product, so the tensor cores form them: of 8 records at a time, rows 0 to 7 of A hold p and rows 8 to 15 hold w,
// columns are pixels, and B holds the weights. Shared memory turns "a lane is two pixels" into "four lanes are a
// record", which then add a row of 16 floats.
//
// The tensor cores take numbers of 16 bits and sum in fp32. SPLIT says how p and w become such numbers:
//   0: as fp16, 11 bits of mantissa: a word is a lane's two pixels. So that all fits fp16's range, gradients are in
//      units of the square's largest one, rounded to a power of two, and transmittance in units of 1/1024: both
//      exact.
//   1: as a sum of two bf16, 16 bits of mantissa and all of fp32's range: a word is one pixel. Twice the products.
// The weights of the moments are small multiples of 1/4, exact in both. The pixels' gradients are a sum of two
// numbers in both, in columns 2c and 2c + 1 for red, green, blue and depth.
//
// Compile-time: STATISTICS (0, 1), SPLIT (0, 1), DEPTH_GRADIENT (0, or 1 with SPLIT: depths know no range) and those of
// raster.h. Each kernel defines COMPACT (0: fewer instructions to execute, 1: fewer to keep in the cache).
#pragma once
#include "raster.h"

namespace bytesplat {

constexpr int GROUP = 8;                  // records reduced together
constexpr int AT_ONCE = COMPACT ? 1 : GROUP / UNROLL;  // passes over UNROLL of them in a line of instructions
constexpr int WORDS = SPLIT ? PIXELS : 1;  // of A that a lane's two pixels become
constexpr int STEPS = 4 * WORDS;          // products of a group: 16 words of A each, from 8 lanes
constexpr float UNIT = SPLIT ? 1.0f : 1024.0f;  // of transmittance
constexpr int ROW = STATISTICS ? ROW_STRIDE_WITH_STATISTICS : ROW_STRIDE;

// The upper part of a number, exact in the matrix format.
__device__ inline float upper_part(float x) {
    return SPLIT ? __uint_as_float(__float_as_uint(x) & 0xffff0000u) : unpack_f16(pack_f16(0.0f, x));
}
// Words of A: one pixel's, or both pixels'.
__device__ inline unsigned split(float x) {
    const float upper = upper_part(x);
    return pack_bf16(upper, x - upper);
}
// A word of B for the same pixels.
__device__ inline unsigned weight_word(float first, float second) {
    return SPLIT ? pack_bf16(first, first) : pack_f16(second, first);
}

__device__ inline void multiply(float d[4], const uint4& a, unsigned b0, unsigned b1) {
    if (SPLIT) multiply_bf16(d, a, b0, b1);
    else multiply_f16(d, a, b0, b1);
}

// Words of numbers that are not negative: the larger one of two, and the largest number that a word stands for.
__device__ inline unsigned larger_word(unsigned a, unsigned b) { return SPLIT ? max(a, b) : larger_f16(a, b); }
__device__ inline float largest_in(unsigned word) {
    if (SPLIT) return __uint_as_float(word & 0xffff0000u) + __uint_as_float(word << 16);
    return fmaxf(unpack_f16(word), unpack_f16(word >> 16));
}

// A, as lanes write it and as the tensor cores want it: a lane writes its words of p and w side by side, and what
// lane (g, t) feeds to a product are those of two neighbouring lanes, four words in a line. The places of odd records
// are swapped in eights, so that lanes which read two records at once hit different banks.
struct __align__(16) Rows {
    uint2 words[GROUP][WORDS * WARP];
#if STATISTICS
    uint2 absolute[GROUP][WARP];  // |d mean2d| of a lane's pixels, x and y
#endif
    // A lane's two pixels.
    __device__ void put(int record, const float p[PIXELS], const float w[PIXELS]) {
        if (SPLIT)
            for (int q = 0; q < PIXELS; ++q)
                words[record][place(record, lane_index(), q)] = make_uint2(split(p[q]), split(w[q]));
        else
            words[record][place(record, lane_index(), 0)] = make_uint2(pack_f16(p[1], p[0]), pack_f16(w[1], w[0]));
    }
#if STATISTICS
    __device__ void put_absolute(int record, const float x[PIXELS], const float y[PIXELS]) {
        const float x0 = fabsf(x[0]), x1 = fabsf(x[1]), y0 = fabsf(y[0]), y1 = fabsf(y[1]);
        absolute[record][place(record, lane_index(), 0)] = SPLIT ? make_uint2(split(x0 + x1), split(y0 + y1))
                                                                : make_uint2(pack_f16(x1, x0), pack_f16(y1, y0));
    }
#endif
    __device__ static int place(int record, int lane, int word) { return (lane + WARP * word) ^ (record % 2 * 8); }
    __device__ uint4 fragment(int record, int step, int t) const {
        return *reinterpret_cast<const uint4*>(&words[record][place(record, step % 4 * 8 + 2 * t, step / 4)]);
    }
};

// Adds a group to its records' gradient rows: lane (g, t) gathers floats 4t to 4t + 3 of the row of record g, its
// `record`. `unit` is that of the gradients. The whole warp calls it.
__device__ inline void add_group(const Rows& rows, const Queued& record, const unsigned (*moment_weights)[2],
                                 const uint4* colour_weights, float unit, float* gradient_rows) {
    const int lane = lane_index(), g = lane / 4, t = lane % 4, quad = lane & ~3;
    float moments[4] = {}, colours[4] = {}, absolute[4] = {};
    unsigned peak = 0;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
        const uint4 first = rows.fragment(g, step, t), second = rows.fragment(g, step + 1, t);
        const uint4 colour = colour_weights[step / 2 * WARP + lane];
        multiply(moments, first, moment_weights[step][0], moment_weights[step][1]);
        multiply(colours, first, colour.x, colour.y);
        multiply(moments, second, moment_weights[step + 1][0], moment_weights[step + 1][1]);
        multiply(colours, second, colour.z, colour.w);
        if (STATISTICS)
            peak = larger_word(larger_word(peak, larger_word(first.y, first.w)), larger_word(second.y, second.w));
    }
#if STATISTICS
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const uint4 fragment = *reinterpret_cast<const uint4*>(&rows.absolute[g][Rows::place(g, 8 * step + 2 * t, 0)]);
        multiply(absolute, fragment, weight_word(1.0f, 1.0f), weight_word(1.0f, 1.0f));
    }
    peak = larger_word(peak, __shfl_xor_sync(ALL_LANES, peak, 1));
    peak = larger_word(peak, __shfl_xor_sync(ALL_LANES, peak, 2));
#endif
    // Lane t has columns 2t and 2t + 1 of row g (moments of p) and of row g + 8 (w: colours; its zeroth moment).
    const float s = __shfl_sync(ALL_LANES, moments[0], quad), sx = __shfl_sync(ALL_LANES, moments[1], quad);
    const float sy = __shfl_sync(ALL_LANES, moments[0], quad + 1), sxx = __shfl_sync(ALL_LANES, moments[1], quad + 1);
    const float sxy = __shfl_sync(ALL_LANES, moments[0], quad + 2), syy = __shfl_sync(ALL_LANES, moments[1], quad + 2);
    const float own = colours[2] + colours[3];
    const float neighbour = __shfl_sync(ALL_LANES, own, t == 1 ? quad : quad + 3);  // red for green, depth for blue
    const float importance = STATISTICS ? __shfl_sync(ALL_LANES, moments[2], quad) : 0.0f;

    const float ux = record.shape.x, uy = record.shape.y;
    const float dx = fmaf(ux, s, -sx), dy = fmaf(uy, s, -sy);  // sums of p times the offset from pixel to mean
    const float dxx = fmaf(ux, dx - sx, sxx), dyy = fmaf(uy, dy - sy, syy), dxy = fmaf(ux, dy, fmaf(-uy, sx, sxy));
    constexpr float LN_2 = 1.0f / LOG2_E;
    // The terms of power, so -log2(e) times those of sigma.
    const float twice_a = 2.0f * record.shape.z, b = record.shape.w, twice_c = 2.0f * record.colour.x;
    const float mean_x = LN_2 * fmaf(twice_a, dx, b * dy), mean_y = LN_2 * fmaf(b, dx, twice_c * dy);
    constexpr float WEIGHT = 1.0f / UNIT;
    float4 sum;
    sum.x = t == 0 ? mean_x : t == 1 ? -0.5f * dyy : t == 2 ? WEIGHT * own : WEIGHT * importance;
    sum.y = t == 0 ? mean_y : t == 1 ? s * exp2_fast(-record.colour.y) : t == 2 ? WEIGHT * neighbour : 0.0f;
    sum.z = t == 0 ? -0.5f * dxx : t == 1 ? WEIGHT * neighbour : t == 2 ? LN_2 * absolute[0] : 0.0f;
    sum.w = t == 0 ? -dxy : t == 1 ? WEIGHT * own : t == 2 ? LN_2 * absolute[2] : 0.0f;
    if (t == 3) unit = 1.0f;  // statistics of alpha T are no gradients
    float* row = gradient_rows + static_cast<long long>(static_cast<int>(__float_as_uint(record.tail.y))) * ROW;
    const bool exists = record.colour.y > -1e29f;
    if (exists && (STATISTICS || t < 3))
        add_vector(row + 4 * t, unit * sum.x, unit * sum.y, unit * sum.z, unit * sum.w);
    if (STATISTICS && exists && t == 3)
        atomicMax(reinterpret_cast<unsigned*>(row + MAX_CONTRIBUTION), __float_as_uint(WEIGHT * largest_in(peak)));
}

// A power of two close to the reciprocal of a warp's largest number; 1 if that is zero or beyond all bounds.
__device__ inline float reciprocal_unit(float magnitude) {
    for (int step = WARP / 2; step > 0; step /= 2)
        magnitude = fmaxf(magnitude, __shfl_xor_sync(ALL_LANES, magnitude, step));
    const unsigned exponent = __float_as_uint(magnitude) >> 23;
    return exponent > 1 && exponent < 253 ? __uint_as_float((254 - exponent) << 23) : 1.0f;
}

// A lane's pixels.
struct PixelGradients {
    float running[PIXELS];  // transmittance as in Blended, in UNITs
    float rest[PIXELS];     // what this and all records behind still add to the differentiated scalar
    float gr[PIXELS], gg[PIXELS], gb[PIXELS], gz[PIXELS];  // the scalar's gradient
    float magnitude;                                       // the largest of all gradients
    float2 bounds[PIXELS];                                 // of depth

    // A pixel with its colour, final transmittance and what the scalar gains by each of them.
    __device__ void set(int q, float r, float g, float b, float transmittance, float d_r, float d_g, float d_b,
                        float d_transmittance) {
        running[q] = UNIT;
        gr[q] = d_r, gg[q] = d_g, gb[q] = d_b;
        rest[q] = fmaf(transmittance, d_transmittance, fmaf(r, d_r, fmaf(g, d_g, b * d_b)));
        magnitude = fmaxf(fmaxf(fmaxf(magnitude, fabsf(d_r)), fmaxf(fabsf(d_g), fabsf(d_b))), fabsf(d_transmittance));
    }
    // Whether any pixel of the warp goes on.
    __device__ bool live() const {
        constexpr float LIMIT = UNIT * TRANSMITTANCE_MIN;
        return __any_sync(ALL_LANES, running[0] > LIMIT || running[1] > LIMIT);
    }
};

// What a warp needs of shared memory besides its queue.
struct __align__(16) Reduction {
    Rows rows;
    uint4 colour_weights[STEPS / 2 * WARP];
    int upcoming[WARP];  // records of the tile's list, on their way here while others are blended
    float centre[2];     // of the square: needed too seldom to hold registers, as the above
};

// Adds to the records' gradient rows what the warp's pixels say: first of those in the queue, `length` of them, then of
// those that places [next, end) of the tile's list hold. Returns how many records it went through. The whole warp calls
// it.
template <int LENGTH>
__device__ inline int add_to_rows(Reduction& shared, Queue<LENGTH>& queue, int length, const Region& region,
                                  PixelGradients& pixels, const float* table, const int* records, unsigned next,
                                  unsigned end, float* gradient_rows) {
    const int lane = lane_index(), g = lane / 4, t = lane % 4;
    const auto fetch = [&] {
        if (next + lane < end) copy_async(&shared.upcoming[lane], &records[next + lane]);
        else shared.upcoming[lane] = -1;
    };
    fetch();
    if (lane == 0) shared.centre[0] = region.centre_x, shared.centre[1] = region.centre_y;

    const float scale = SPLIT ? 1.0f : reciprocal_unit(pixels.magnitude);

    // Phase 1: B. Lane (g, t) holds column g of the pixels of two neighbouring lanes: a moment's weights, and of the
    // pixels' gradients upper and lower parts in turn.
    float* channels = reinterpret_cast<float*>(&shared.rows);  // [4, 64], for now
#pragma unroll
    for (int q = 0; q < PIXELS; ++q) {
        pixels.rest[q] *= scale, pixels.gz[q] *= scale;
        pixels.gr[q] *= scale, pixels.gg[q] *= scale, pixels.gb[q] *= scale;
        const int pixel = lane + WARP * q;
        channels[pixel] = pixels.gr[q], channels[64 + pixel] = pixels.gg[q];
        channels[128 + pixel] = pixels.gb[q], channels[192 + pixel] = pixels.gz[q];
        pixels.gr[q] *= 1.0f / UNIT, pixels.gg[q] *= 1.0f / UNIT, pixels.gb[q] *= 1.0f / UNIT;
    }
    __syncwarp();
    unsigned moment_weights[STEPS][2];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const auto weight = [&](int q) {
                const float x = 2 * t + h - 3.5f, y = step % 4 + ROW_STEP * q - 3.5f;
                const float linear = g == 0 ? 1.0f : g == 1 ? x : y, square = g == 3 ? x * x : g == 4 ? x * y : y * y;
                return g < 3 ? linear : g < 6 ? square : 0.0f;
            };
            moment_weights[step][h] = weight_word(weight(SPLIT ? step / 4 : 0), weight(1));
        }
#pragma unroll 1
    for (int step = 0; step < STEPS; step += 2) {
        unsigned colour[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int source = (step + i / 2) % 4 * 8 + 2 * t + i % 2;
            const auto part = [&](int q) {
                const float value = channels[64 * (g / 2) + source + WARP * q], upper = upper_part(value);
                return g % 2 ? value - upper : upper;
            };
            colour[i] = weight_word(part(SPLIT ? step / 4 : 0), part(1));
        }
        shared.colour_weights[step / 2 * WARP + lane] = make_uint4(colour[0], colour[1], colour[2], colour[3]);
    }
    __syncwarp();

    int done = 0;
    while (true) {
        const bool last = next >= end;
        if (last && lane < GROUP - 1) queue.put(length + lane, faint_record());  // to fill the last group
        __syncwarp();
        int head = 0;
        for (; head + GROUP <= length || (last && head < length); head += GROUP) {
            if (!pixels.live()) return done + head;
            // Phase 2: p and w of 8 records at the lane's pixels.
#pragma unroll AT_ONCE
            for (int first = 0; first < GROUP; first += UNROLL) {
                float opacity[UNROLL][PIXELS];
                Column column[UNROLL];
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    column[u] = column_of(queue[head + first + u], region);
#pragma unroll
                    for (int q = 0; q < PIXELS; ++q) opacity[u][q] = exp2_fast(power_at(column[u], q));
                }
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const Queued record = queue[head + first + u];
                    const float4 colour = record.colour;
                    const Tail tail = record.tail;
                    float p[PIXELS], weight[PIXELS], absolute_x[PIXELS], absolute_y[PIXELS];
#pragma unroll
                    for (int q = 0; q < PIXELS; ++q) {
                        float alpha = fminf(opacity[u][q], ALPHA_MAX);
                        alpha = takes(alpha, depth_of(tail), pixels.bounds[q]) ? alpha : 0.0f;
                        const float before = pixels.running[q], behind = fmaf(-alpha, before, before);
                        const bool blended = blends(before, behind, UNIT);
                        weight[q] = blended ? alpha * before : 0.0f;
                        const float blue = tail.x * pixels.gb[q];
                        float scalar = fmaf(colour.z, pixels.gr[q], fmaf(colour.w, pixels.gg[q], blue));
                        if (DEPTH_GRADIENT) scalar = fmaf(depth_of(tail), pixels.gz[q], scalar);
                        pixels.rest[q] = fmaf(-weight[q], scalar, pixels.rest[q]);
                        pixels.running[q] = behind;
                        // alpha dL/dalpha = alpha (T s - R / (1 - alpha)) = w (s - R / (T (1 - alpha)))
                        p[q] = weight[q] * fmaf(-pixels.rest[q], reciprocal_fast(behind), scalar);
                        p[q] = blended && opacity[u][q] <= ALPHA_MAX ? p[q] : 0.0f;
                        if (STATISTICS) {  // in units of power: a factor of ln 2 is left for later
                            const float dy = column[u].dy - static_cast<float>(ROW_STEP * q);
                            absolute_x[q] = p[q] * fmaf(record.shape.w, dy, 2.0f * record.shape.z * column[u].dx);
                            absolute_y[q] = p[q] * fmaf(colour.x, dy, fmaf(colour.x, dy, column[u].slope));
                        }
                    }
                    shared.rows.put(first + u, p, weight);
#if STATISTICS
                    shared.rows.put_absolute(first + u, absolute_x, absolute_y);
#endif
                }
            }
            __syncwarp();
            // Phase 3: their sums over the pixels.
            add_group(shared.rows, queue[head + g], moment_weights, shared.colour_weights, 1.0f / scale, gradient_rows);
            __syncwarp();
        }
        done += min(head, length);
        if (last || !pixels.live()) return done;
        // Phase 4: fewer than 8 records wait for the next ones at the head of the queue.
        length -= head;
        if (head > 0) {
            Queued waiting = faint_record();
            if (lane < length) waiting = queue[head + lane];
            __syncwarp();
            if (lane < length) queue.put(lane, waiting);
        }
        copy_async_wait();
        const Fetched fetched = fetch_record(table, shared.upcoming[lane]);
        length = append(queue, length, select(fetched, shared.centre[0], shared.centre[1]));
        next += WARP;
        fetch();
    }
}

}  // namespace bytesplat
