"""Stage shake: noise on the means of faint Gaussians."""

from __future__ import annotations

import torch

from bytesplat_ns.density import philox
from bytesplat_ns.density.rotation import rotate, rotate_back
from bytesplat_ns.ops.layout import Gaussians

GATE_STEEPNESS = 100.0
"""Noise fades with opacity o as sigmoid(steepness (min_opacity - o))."""

GATE_MIN = 2.0**-24
"""Gates below it count as closed: their noise would be lost in the rounding of a float32."""


@torch.no_grad()
def shake(gaussians: Gaussians, strength: float, min_opacity: float, *, seed: int, step: int) -> None:
    """Adds strength * gate(opacity) * covariance * normal noise to the means, in place (3DGS-MCMC's equation 9).

    Args:
        strength: of a Gaussian whose gate is open, in 1 / world units.
        min_opacity: where the gate is half open.
        seed, step: of the random numbers, which belong to ids.
    """
    # In float64: the last bit of a vectorized float32 function depends on the row.
    opacity = gaussians.opacities.squeeze(1).double().sigmoid()
    gate = torch.sigmoid(GATE_STEEPNESS * (min_opacity - opacity))
    rows = (gate > GATE_MIN).nonzero().squeeze(1)
    noise = philox.normal(gaussians.ids[rows], 3, seed=seed, step=step).double()
    quats, variance = gaussians.quats[rows].double(), (2.0 * gaussians.scales[rows].double()).exp()
    noise = rotate(quats, variance * rotate_back(quats, noise))  # the covariance is R diag(variance) R^T
    gaussians.means.index_add_(0, rows, (strength * gate[rows, None] * noise).to(gaussians.means.dtype))
