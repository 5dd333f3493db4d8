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

BS_HD inline void adam_update(const AdamStep& adam, float gradient, float& parameter, float& exp_avg, float& exp_avg_sq) {
    exp_avg += adam.first_rate * (gradient - exp_avg);
    exp_avg_sq += adam.second_rate * (gradient * gradient - exp_avg_sq);
    parameter -= adam.step_size * exp_avg / (sqrt(exp_avg_sq) * adam.root_correction + adam.eps);
}

}  // namespace bytesplat
