// Stage loss: (1 - lambda) L1 + lambda (1 - SSIM) of each view, and its gradient, in one sweep down the image.
//
// SSIM needs five windowed means forward (x, y, x^2, y^2, xy) and three windowed sums backward (the derivatives by three
// of them). Both windows are separable: each row is blurred along itself once, and the columns are blurred from the last
// eleven such rows, which are kept in rings. So a sweep holds about a hundred rows, not a dozen images. A thread sweeps
// a band of rows and the ten rows around it that its gradient depends on; what it computes for a row does not depend
// on where bands begin.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../common/ssim.h"
#include "entry.h"
#include "parallel.h"

namespace bytesplat {
namespace {

constexpr int CHANNELS = 3;
constexpr int REACH = SSIM_TAPS - 1;   // a window at row k holds rows k to k + REACH
constexpr int CENTRE = SSIM_TAPS / 2;

struct LossInput {
    int views, width, height;    // images have the size of the largest view
    const int32_t* sizes;        // [V, 2] width, height
    const float* rgb;            // [V, H, W, 3], unclamped
    const float* transmittance;  // [V, H, W]
    const void* target;          // [V, H, W, target_channels]
    int target_is_uint8, target_channels;
    const float* background;     // [V, 3]
    const uint8_t* mask;         // [V, H, W], non-zero = keep, or null
    float ssim_lambda;
};

struct LossOutput {
    float* values;           // [V]
    float* d_rgb;            // [V, H, W, 3]
    float* d_transmittance;  // [V, H, W]
};

float unit(uint8_t value) { return float(value) * (1.0f / 255.0f); }
float unit(float value) { return value; }

// One view: addressing of its rows, and the weights of its terms.
struct View {
    const LossInput& in;
    int index, width, height;  // the view's own size
    const float* background;
    float pixel_weight = 0.0f;   // of |x - y| of a kept pixel and channel
    float window_weight = 0.0f;  // of the SSIM of a window and channel
    bool any_window = false;

    View(const LossInput& in, int index)
        : in(in), index(index), width(in.sizes[2 * index]), height(in.sizes[2 * index + 1]),
          background(in.background + 3 * index) {
        int64_t pixels = int64_t(width) * height;
        int64_t windows = int64_t(std::max(0, width - REACH)) * std::max(0, height - REACH);
        if (in.mask) count_kept(pixels, windows);
        any_window = windows > 0;
        if (pixels > 0) pixel_weight = (1.0f - in.ssim_lambda) / float(CHANNELS * pixels);
        if (windows > 0) window_weight = in.ssim_lambda / float(CHANNELS * windows);
    }

    // Pixels, and windows by their centre.
    void count_kept(int64_t& pixels, int64_t& windows) const {
        pixels = windows = 0;
        for (int y = 0; y < height; ++y)
            for (int x = 0; x < width; ++x) {
                const bool centre = y >= CENTRE && y < height - CENTRE && x >= CENTRE && x < width - CENTRE;
                pixels += kept(y, x);
                windows += kept(y, x) && centre;
            }
    }

    int64_t pixel(int y) const { return (int64_t(index) * in.height + y) * in.width; }  // first of row y in [V, H, W]
    bool kept(int y, int x) const { return in.mask == nullptr || in.mask[pixel(y) + x] != 0; }

    // Image before clamping, over the background: [3 width].
    void compose(int y, float* out) const {
        const float* rgb = in.rgb + CHANNELS * pixel(y);
        const float* transmittance = in.transmittance + pixel(y);
        for (int x = 0; x < width; ++x)
            for (int c = 0; c < CHANNELS; ++c)
                out[CHANNELS * x + c] = rgb[CHANNELS * x + c] + transmittance[x] * background[c];
    }

    // Target over the background: [3 width].
    void target(int y, float* out) const {
        in.target_is_uint8 ? target(static_cast<const uint8_t*>(in.target), y, out)
                           : target(static_cast<const float*>(in.target), y, out);
    }
    template <class Value> void target(const Value* values, int y, float* out) const {
        const Value* row = values + in.target_channels * pixel(y);
        if (in.target_channels == CHANNELS) {
            for (int i = 0; i < CHANNELS * width; ++i) out[i] = unit(row[i]);
            return;
        }
        for (int x = 0; x < width; ++x) {
            const float alpha = unit(row[4 * x + 3]);
            for (int c = 0; c < CHANNELS; ++c)
                out[CHANNELS * x + c] = unit(row[4 * x + c]) * alpha + (1.0f - alpha) * background[c];
        }
    }
};

// Weighted sum of eleven rows, element by element.
void blur_columns(const float* const rows[SSIM_TAPS], float* out, int count) {
#pragma omp simd
    for (int i = 0; i < count; ++i) {
        float sum = 0.0f;
        for (int tap = 0; tap < SSIM_TAPS; ++tap) sum += ssim_weight(tap) * rows[tap][i];
        out[i] = sum;
    }
}

// Weighted sum of eleven neighbours in a row of pixels, channel by channel: out[i] = sum_t weight(t) in[i + 3 t].
void blur_row(const float* in, float* out, int count) {
    const float* taps[SSIM_TAPS];
    for (int tap = 0; tap < SSIM_TAPS; ++tap) taps[tap] = in + CHANNELS * tap;
    blur_columns(taps, out, count);
}

// Sum in an order that does not depend on the compiler's vectors or on alignment.
double ordered_sum(const float* values, int count) {
    constexpr int WAYS = 8;
    double partial[WAYS] = {};
    int i = 0;
    for (; i + WAYS <= count; i += WAYS)
        for (int way = 0; way < WAYS; ++way) partial[way] += double(values[i + way]);
    for (; i < count; ++i) partial[i % WAYS] += double(values[i]);
    double sum = 0.0;
    for (const double part : partial) sum += part;
    return sum;
}

// The last eleven rows of some quantity, by row number.
class Ring {
  public:
    explicit Ring(int length) : length_(length), rows_(SSIM_TAPS * length) {}
    float* operator[](int row) { return rows_.data() + (row % SSIM_TAPS) * length_; }

  private:
    int64_t length_;
    std::vector<float> rows_;
};

// Sweeps the rows that the gradient of rows [first, last) depends on. row_values [height] receives, for each row of the
// band, its share of the loss.
class Sweep {
  public:
    Sweep(const View& view, int first, int last, const LossOutput& out, double* row_values)
        : view_(view), first_(first), last_(last), out_(out), row_values_(row_values), scratch_(length()), zeros_(length()) {
        for (std::vector<float>& row : means_) row.resize(length());
        for (std::vector<float>& row : padded_) row.resize(length() + CHANNELS * REACH);
    }

    void run() {
        const bool structural = view_.any_window && view_.in.ssim_lambda != 0.0f;
        const int windows = structural ? view_.height - REACH : 0;  // rows of windows
        const int begin = structural ? std::max(0, first_ - REACH) : first_;
        const int end = structural ? std::min(view_.height, last_ + REACH) : last_;
        for (int y = begin; y < end; ++y) {
            load(y);
            if (!structural) {
                finish(y, 0, 0);
                continue;
            }
            blur_moments(y);
            if (y - begin < REACH) continue;
            const int window = y - REACH;
            similarity(window);
            if (window >= first_) finish(window, begin, window + 1);
        }
        if (structural)  // the rows below the last row of windows
            for (int y = std::max(first_, windows); y < last_; ++y) finish(y, begin, windows);
    }

  private:
    int length() const { return CHANNELS * view_.width; }
    int window_length() const { return CHANNELS * (view_.width - REACH); }

    // Image and target of a row, clamped; zero where masked.
    void load(int y) {
        float *image = image_[y], *target = target_[y];
        view_.compose(y, image);
        view_.target(y, target);
        for (int i = 0; i < length(); ++i) image[i] = clamp(image[i], 0.0f, 1.0f);
        if (view_.in.mask)
            for (int i = 0; i < length(); ++i)
                if (!view_.kept(y, i / CHANNELS)) image[i] = target[i] = 0.0f;
    }

    void blur_moments(int y) {
        const float *x = image_[y], *t = target_[y];
        blur_row(x, moments_[0][y], window_length());
        blur_row(t, moments_[1][y], window_length());
        const auto blur_product = [&](const float* a, const float* b, float* out) {
            for (int i = 0; i < length(); ++i) scratch_[i] = a[i] * b[i];
            blur_row(scratch_.data(), out, window_length());
        };
        blur_product(x, x, moments_[2][y]);
        blur_product(t, t, moments_[3][y]);
        blur_product(x, t, moments_[4][y]);
    }

    // SSIM of the windows at row `window`, and its derivatives spread along the row.
    void similarity(int window) {
        const int count = window_length();
        for (int m = 0; m < 5; ++m) {
            const float* rows[SSIM_TAPS];
            for (int tap = 0; tap < SSIM_TAPS; ++tap) rows[tap] = moments_[m][window + tap];
            blur_columns(rows, means_[m].data(), count);
        }
        // Derivatives lie behind REACH pixels of zeros, so that blurring them spreads each over its window.
        float* derivatives[3];
        for (int d = 0; d < 3; ++d) derivatives[d] = padded_[d].data() + CHANNELS * REACH;
#pragma omp simd
        for (int i = 0; i < count; ++i) {
            const Ssim<float> s = ssim(means_[0][i], means_[1][i], means_[2][i], means_[3][i], means_[4][i]);
            scratch_[i] = 1.0f - s.value;
            derivatives[0][i] = s.d_mean;
            derivatives[1][i] = s.d_square;
            derivatives[2][i] = s.d_product;
        }
        if (view_.in.mask)
            for (int i = 0; i < count; ++i)
                if (!view_.kept(window + CENTRE, i / CHANNELS + CENTRE))
                    scratch_[i] = derivatives[0][i] = derivatives[1][i] = derivatives[2][i] = 0.0f;
        if (window >= first_ && window < last_)
            row_values_[window] += double(view_.window_weight) * ordered_sum(scratch_.data(), count);
        for (int d = 0; d < 3; ++d) blur_row(padded_[d].data(), derivatives_[d][window], length());
    }

    // Gradient of row y, given the derivatives of windows [begin, end), and the row's share of L1.
    void finish(int y, int begin, int end) {
        const float *image = image_[y], *target = target_[y];
        for (int d = 0; d < 3; ++d) {
            const float* rows[SSIM_TAPS];
            for (int tap = 0; tap < SSIM_TAPS; ++tap) {
                const int window = y - REACH + tap;
                rows[tap] = window >= begin && window < end ? derivatives_[d][window] : zeros_.data();
            }
            blur_columns(rows, means_[d].data(), length());
        }
        view_.compose(y, scratch_.data());
        float* d_rgb = out_.d_rgb + CHANNELS * view_.pixel(y);
#pragma omp simd
        for (int i = 0; i < length(); ++i) {
            const float difference = image[i] - target[i];
            const float sign = difference > 0.0f ? 1.0f : difference < 0.0f ? -1.0f : 0.0f;
            const float structural = means_[0][i] + 2.0f * image[i] * means_[1][i] + target[i] * means_[2][i];
            const float gradient = view_.pixel_weight * sign - view_.window_weight * structural;
            d_rgb[i] = scratch_[i] >= 0.0f && scratch_[i] <= 1.0f ? gradient : 0.0f;
            scratch_[i] = difference < 0.0f ? -difference : difference;
        }
        row_values_[y] += double(view_.pixel_weight) * ordered_sum(scratch_.data(), length());
        if (view_.in.mask)
            for (int i = 0; i < length(); ++i)
                if (!view_.kept(y, i / CHANNELS)) d_rgb[i] = 0.0f;
        float* d_transmittance = out_.d_transmittance + view_.pixel(y);
        const float* background = view_.background;
        for (int x = 0; x < view_.width; ++x)
            d_transmittance[x] = d_rgb[CHANNELS * x] * background[0] + d_rgb[CHANNELS * x + 1] * background[1] +
                                 d_rgb[CHANNELS * x + 2] * background[2];
    }

    const View& view_;
    int first_, last_;
    const LossOutput& out_;
    double* row_values_;
    Ring image_{length()}, target_{length()};
    Ring moments_[5] = {Ring(length()), Ring(length()), Ring(length()), Ring(length()), Ring(length())};
    Ring derivatives_[3] = {Ring(length()), Ring(length()), Ring(length())};
    std::vector<float> means_[5];   // blurred columns of one row
    std::vector<float> padded_[3];  // derivatives of one row of windows between zeros
    std::vector<float> scratch_, zeros_;
};

}  // namespace
}  // namespace bytesplat

extern "C" int64_t bytesplat_loss(int threads, const bytesplat::LossInput* in, const bytesplat::LossOutput* out) try {
    using namespace bytesplat;
    std::vector<View> views;
    for (int view = 0; view < in->views; ++view) views.emplace_back(*in, view);
    std::vector<double> row_values(int64_t(in->views) * in->height);
    std::fill_n(out->d_rgb, CHANNELS * int64_t(in->height) * in->width * in->views, 0.0f);
    std::fill_n(out->d_transmittance, int64_t(in->height) * in->width * in->views, 0.0f);

    const int bands = (threads + in->views - 1) / in->views;  // of each view
    parallel_for(threads, in->views * bands, 1, [&](int64_t i) {
        const View& view = views[i / bands];
        const int band = int(i % bands), first = view.height * band / bands, last = view.height * (band + 1) / bands;
        if (first < last) Sweep(view, first, last, *out, &row_values[int64_t(view.index) * in->height]).run();
    });
    for (int view = 0; view < in->views; ++view) {
        double value = 0.0;
        for (int y = 0; y < views[view].height; ++y) value += row_values[int64_t(view) * in->height + y];
        out->values[view] = float(value);
    }
    return 0;
} catch (...) {
    return bytesplat::failure();
}
