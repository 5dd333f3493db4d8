"""Adam (``csrc/cuda/adam.cu``)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import AdamStep, Gaussians
from bytesplat_ns.ops.nvrtc import Program

from .buffers import upload

ADAM = Program("adam.cu")
THREADS = 256


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
    """One dense step of Adam, in place; see ``ops.reference.adam``."""
    parameter = parameter.detach()
    assert all(t.is_contiguous() for t in (parameter, exp_avg, exp_avg_sq)), "updated in place, row by row"
    ADAM.kernel("adam")(
        -(-parameter.numel() // (4 * THREADS)),
        THREADS,
        parameter,
        gradient.contiguous(),
        None if square is None else square.contiguous(),
        exp_avg,
        exp_avg_sq,
        parameter.numel(),
        *adam_constants(lr, beta1, beta2, eps, step),
    )


def adam_constants(
    lr: float, beta1: float, beta2: float, eps: float, step: float
) -> tuple[float, float, float, float, float]:
    """What ``AdamStep`` in ``csrc/common/adam.h`` holds: rates of both moments, step size, root correction, eps."""
    return 1 - beta1, 1 - beta2, lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, eps


def place(step: AdamStep, device: torch.device, table: Tensor | None = None) -> AdamStep:
    """The step with its ``table`` on the device, in the given memory if there is some."""
    steps = [adam_constants(step.rates[name], *step.betas, step.eps, step.number) for name in Gaussians.PARAMETERS]
    first_rate, second_rate, _, root_correction, eps = steps[0]
    values = [first_rate, second_rate, root_correction, eps, *(constants[2] for constants in steps)]
    table = torch.empty(len(values), device=device) if table is None else table
    upload(values, table)
    return replace(step, table=table)
