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
    views, height, width, channels = target.shape
    device, bytes_ = target.device, target.dtype == torch.uint8
    switches = {"TARGET_CHANNELS": channels, "TARGET_BYTES": bytes_, "MASKED": mask is not None}
    target = (target if bytes_ else target.float()).contiguous().view(torch.uint8)
    sizes = cameras.sizes.contiguous()
    counts = None
    if mask is not None:
        mask = mask.contiguous()
        counts = torch.zeros(views, 2, dtype=torch.int64, device=device)
        LOSS.kernel("count_kept", **switches)(views * height, THREADS, mask, sizes, width, height, counts)
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
