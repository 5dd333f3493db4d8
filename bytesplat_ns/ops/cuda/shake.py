"""Noise on the means of faint Gaussians (``csrc/cuda/shake.cu``)."""

from __future__ import annotations

from bytesplat_ns.ops.layout import Gaussians
from bytesplat_ns.ops.nvrtc import Program

SHAKE = Program("shake.cu")
THREADS = 256


def shake(gaussians: Gaussians, strength: float, min_opacity: float, *, seed: int, step: int) -> None:
    """Shakes the means, in place; see ``ops.reference.shake``. In float32, so the last bits are its own."""
    parameters = gaussians.means, gaussians.quats, gaussians.scales, gaussians.opacities
    parameters = [parameter.detach() for parameter in parameters]
    assert all(parameter.is_contiguous() for parameter in parameters), "updated in place, row by row"
    SHAKE.kernel("shake")(
        -(-len(gaussians) // THREADS),
        THREADS,
        *parameters,
        gaussians.ids,
        len(gaussians),
        strength,
        min_opacity,
        seed,
        step,
    )
