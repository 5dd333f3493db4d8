"""The optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..layout import COLOURS, AdamStep, Gaussians, Lag
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
    square: Tensor | None = None,
) -> None:
    """One step of Adam (Kingma and Ba 2015, algorithm 1), in place on the parameter and its two moments.

    Dense: a parameter with zero gradient still moves with its momentum. As in ``torch.optim.Adam``, ``eps``
    is added to the bias-corrected root.

    Args:
        parameter, gradient, exp_avg, exp_avg_sq: of one shape.
        step: number of this step, from 1; a fraction where earlier steps had other betas (``GaussianAdam.age``).
        square: of that shape too, what exp_avg_sq averages, where that is not the gradient's square.
    """
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2)
    if square is None:
        exp_avg_sq.addcmul_(gradient, gradient, value=1 - beta2)
    else:
        exp_avg_sq.add_(square, alpha=1 - beta2)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt()
    parameter.sub_(exp_avg / (root + eps), alpha=lr / (1 - beta1**step))


@stage
def catch_up(gaussians: Gaussians, moments: Mapping[str, tuple[Tensor, Tensor]], lag: Lag, rows: Tensor) -> None:
    """Gives the colours of some Gaussians the steps on record that they have not had: steps without a gradient.

    Args:
        moments: exp_avg and exp_avg_sq of the colours, by name.
        rows: [n] int64, whose.
    """
    for number, step in enumerate(lag.past):
        behind = rows[lag.caught_up[rows] <= number]
        for name in COLOURS:
            update_rows(getattr(gaussians, name), 0.0, moments[name], step, name, behind)
    lag.caught_up[rows] = len(lag.past)


@stage
def update_rows(
    parameter: Tensor,
    gradient: Tensor | float,
    moments: tuple[Tensor, Tensor],
    step: AdamStep,
    name: str,
    rows: Tensor,
    square: Tensor | None = None,
) -> None:
    """``adam`` on some rows [n] of a parameter. ``gradient``, ``square``: of these rows."""
    parameter = parameter.detach()
    part, first, second = parameter[rows], moments[0][rows], moments[1][rows]
    gradient = gradient if isinstance(gradient, Tensor) else torch.full_like(part, gradient)
    betas = {"beta1": step.betas[0], "beta2": step.betas[1]}
    adam(part, gradient, first, second, lr=step.rates[name], **betas, eps=step.eps, step=step.number, square=square)
    parameter[rows], moments[0][rows], moments[1][rows] = part, first, second
