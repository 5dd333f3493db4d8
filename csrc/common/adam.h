// One element of Adam (Kingma & Ba 2015, algorithm 1) as torch.optim.Adam computes it: bias corrected, eps outside the
// root. All factors come from the host, which forms them in double: 1 - 0.999f is wrong in its fifth digit.
#pragma once
#include "platform.h"

namespace bytesplat {

struct AdamStep {
    float first_rate;       // 1 - beta1
    float second_rate;      // 1 - beta2
    float step_size;        // lr / (1 - beta1^step)
    float root_correction;  // 1 / sqrt(1 - beta2^step)
    float eps;
};

// The constants of one step of all trained parameters, whose step sizes are in the order of ops.layout.Gaussians. It
// lies in device memory and not in a kernel's arguments: a recorded step is replayed with other rates.
struct AdamTable {
    float first_rate, second_rate, root_correction, eps;
    float step_sizes[6];

    BS_HD AdamStep step(int parameter) const {
        return {first_rate, second_rate, step_sizes[parameter], root_correction, eps};
    }
};

// The second moment. In a round of several views `square` is the mean of the squares of the views' gradients.
BS_HD inline void adam_average(const AdamStep& adam, float square, float& exp_avg_sq) {
    exp_avg_sq += adam.second_rate * (square - exp_avg_sq);
}

// The first moment and the parameter, once the second moment is that of this step. `gradient`: mean over views.
BS_HD inline void adam_move(const AdamStep& adam, float gradient, float& parameter, float& exp_avg, float exp_avg_sq) {
    exp_avg += adam.first_rate * (gradient - exp_avg);
    parameter -= adam.step_size * exp_avg / (sqrt(exp_avg_sq) * adam.root_correction + adam.eps);
}

// The step on one view.
BS_HD inline void adam_update(const AdamStep& adam, float gradient, float& parameter, float& exp_avg, float& exp_avg_sq) {
    adam_average(adam, gradient * gradient, exp_avg_sq);
    adam_move(adam, gradient, parameter, exp_avg, exp_avg_sq);
}

// What steps [from, to) without a gradient do to an element of a parameter: adam_update, again and again, until what is
// left cannot change the parameter, and from there on to its moments alone.
//
// `fastest` is the largest step_size / root_correction among the steps. A step moves the parameter by at most fastest
// |exp_avg| / sqrt(exp_avg_sq), which falls from step to step, as beta1^2 < beta2. Once that is 2^-26 of the parameter, a
// quarter of the distance to the next float, no later step has an effect.
BS_HD inline void adam_coast(const AdamTable* steps, float fastest, int name, int from, int to, float& parameter,
                             float& exp_avg, float& exp_avg_sq) {
    constexpr float STILL = 1.0f / (1 << 26);
    int k = from;
    for (; k < to; ++k) {
        const float moved = larger(exp_avg, -exp_avg) * fastest;
        if (moved <= STILL * larger(parameter, -parameter) * sqrt(exp_avg_sq)) break;
        adam_update(steps[k].step(name), 0.0f, parameter, exp_avg, exp_avg_sq);
    }
    for (; k < to; ++k) {
        exp_avg += steps[k].first_rate * (0.0f - exp_avg);
        exp_avg_sq += steps[k].second_rate * (0.0f - exp_avg_sq);
    }
}

}  // namespace bytesplat
