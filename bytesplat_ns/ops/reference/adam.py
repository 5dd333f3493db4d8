"""The optimizer's step."""

from __future__ import annotations

from torch import Tensor

from .stage import stage


@stage
def adam(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-15,
    step: float,
) -> None:
    """One step of Adam (Kingma and Ba 2015, algorithm 1), in place on the parameter and its two moments.

    Dense: a parameter with zero gradient still moves with its momentum. As in ``torch.optim.Adam``, ``eps``
    is added to the bias-corrected root.

    Args:
        parameter, gradient, exp_avg, exp_avg_sq: of one shape.
        step: number of this step, from 1; a fraction where earlier steps had other betas (``GaussianAdam.age``).
    """
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt()
    parameter.sub_(exp_avg / (root + eps), alpha=lr / (1 - beta1**step))
