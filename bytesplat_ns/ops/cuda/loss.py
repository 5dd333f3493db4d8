"""The photometric loss and its gradient (``csrc/cuda/loss.cu``)."""

from __future__ import annotations

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, Image, ImageGradients
from bytesplat_ns.ops.nvrtc import Program

from .buffers import DeviceImage

LOSS = Program("loss.cu")
THREADS = 256
SIDE = 32


def loss(
    image: Image,
    target: Tensor,
    background: Tensor,
    cameras: Cameras,
    ssim_lambda: float = 0.2,
    mask: Tensor | None = None,
) -> tuple[Tensor, ImageGradients]:
    """Loss of each view [V] and its gradient; see ``ops.reference.loss``."""
    state = image.state if isinstance(image, DeviceImage) else None
    views, height, width, _ = target.shape
    device, switches = target.device, loss_switches(target, mask)
    sizes = cameras.sizes.contiguous()
    counts = kept_counts(mask, target, sizes)
    target, mask = as_bytes(target), None if mask is None else mask.contiguous()
    inputs = (image.rgb, image.transmittance, target, mask, background.float().contiguous(), sizes, width, height)
    sums = torch.zeros(views, 2, dtype=torch.float64, device=device)
    derivatives = torch.empty(views, 3, 3, height, width, device=device)
    values = torch.empty(views, device=device)
    gradients = ImageGradients(torch.empty_like(image.rgb), None, torch.empty_like(image.transmittance))
    blocks = views * -(-height // SIDE) * -(-width // SIDE)
    LOSS.kernel("photometric_terms", **switches)(blocks, THREADS, *inputs, sums, derivatives, state)
    LOSS.kernel("photometric_gradient", **switches)(
        blocks,
        THREADS,
        *inputs,
        ssim_lambda,
        counts,
        sums,
        derivatives,
        values,
        gradients.rgb,
        gradients.transmittance,
        state,
    )
    return values, gradients


def loss_switches(target: Tensor, mask: Tensor | None) -> dict[str, int]:
    """Compile-time constants that say what the photos are."""
    return {
        "TARGET_CHANNELS": target.shape[-1],
        "TARGET_BYTES": target.dtype == torch.uint8,
        "MASKED": mask is not None,
    }


def as_bytes(target: Tensor) -> Tensor:
    """Bytes or float32, as the kernels read either."""
    return (target if target.dtype == torch.uint8 else target.float()).contiguous().view(torch.uint8)


def kept_counts(mask: Tensor | None, target: Tensor, sizes: Tensor) -> Tensor | None:
    """Kept pixels and windows of each view, [V, 2]; None without a mask."""
    if mask is None:
        return None
    views, height, width, _ = target.shape
    counts = torch.zeros(views, 2, dtype=torch.int64, device=target.device)
    kernel = LOSS.kernel("count_kept", **loss_switches(target, mask))
    kernel(views * height, THREADS, mask.contiguous(), sizes, width, height, counts)
    return counts
