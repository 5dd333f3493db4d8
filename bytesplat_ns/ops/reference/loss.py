"""The photometric loss: L1 and structural dissimilarity between a composed image and a photo."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from ..layout import Cameras, Image, ImageGradients
from .stage import stage

WINDOW = 11
"""Side of the SSIM window in pixels."""

WINDOW_SIGMA = 1.5
"""Standard deviation of the SSIM window in pixels."""

C1, C2 = 0.01**2, 0.03**2
"""SSIM's stabilising constants for colours in [0, 1]."""


@stage
def loss(
    image: Image,
    target: Tensor,
    background: Tensor,
    cameras: Cameras,
    ssim_lambda: float = 0.2,
    mask: Tensor | None = None,
) -> tuple[Tensor, ImageGradients]:
    """(1 - lambda) L1 + lambda (1 - SSIM) of each view, and its gradient (Kerbl et al. 2023, equation 7).

    The image is composed over the background and clamped to [0, 1] first. A masked pixel counts in neither
    term; a term that has nothing to average (every pixel masked, a side under 11 px, every window's centre
    masked) is left out.

    Args:
        image: unclamped, without background.
        target: [V, H, W, 3 or 4] photo, uint8 (0 to 255) or float (0 to 1); its alpha, if any, composes it
            over the same background.
        background: [V, 3] colour, 0 to 1.
        ssim_lambda: weight of the structural term.
        mask: [V, H, W] uint8 or bool, non-zero where a pixel counts.

    Returns:
        Values [V], one per view: the loss of a round is their sum. Gradients of rgb and transmittance.
    """
    rgb, transmittance = (part.detach().requires_grad_() for part in (image.rgb, image.transmittance))
    with torch.enable_grad():
        values = torch.stack(
            [
                _view_loss(
                    rgb[view, :height, :width],
                    transmittance[view, :height, :width],
                    target[view, :height, :width],
                    background[view].to(rgb.dtype),
                    ssim_lambda,
                    None if mask is None else mask[view, :height, :width] != 0,
                )
                for view, (width, height) in enumerate(cameras.sizes.tolist())
            ]
        )
        d_rgb, d_transmittance = torch.autograd.grad(values.sum(), (rgb, transmittance))
    return values.detach(), ImageGradients(d_rgb, None, d_transmittance)


def _view_loss(
    rgb: Tensor,
    transmittance: Tensor,
    target: Tensor,
    background: Tensor,
    ssim_lambda: float,
    mask: Tensor | None,
) -> Tensor:
    """The loss of one view at its own size; arguments as in ``loss`` without the dimension of views."""
    composed = (rgb + transmittance[..., None] * background).clamp(0, 1)
    target = target.to(rgb.dtype) / (255 if target.dtype == torch.uint8 else 1)
    if target.shape[-1] == 4:
        target = target[..., :3] * target[..., 3:] + (1 - target[..., 3:]) * background
    kept = torch.ones_like(transmittance, dtype=torch.bool) if mask is None else mask

    value = (1 - ssim_lambda) * _mean((composed - target).abs(), kept)
    margin = WINDOW // 2
    if min(kept.shape) >= WINDOW and (centres := kept[margin:-margin, margin:-margin]).any():
        keep = kept[..., None]
        value = value + ssim_lambda * (1 - _mean(ssim_map(composed * keep, target * keep), centres))
    return value


def ssim_map(first: Tensor, second: Tensor) -> Tensor:
    """Structural similarity of two images [H, W, 3] in [0, 1] in each window inside: [H - 10, W - 10, 3].

    Wang et al., "Image Quality Assessment" (2004), equation 13, with its 11x11 Gaussian window.
    """
    position = torch.arange(WINDOW, device=first.device, dtype=first.dtype) - WINDOW // 2
    window = torch.exp(-(position**2) / (2 * WINDOW_SIGMA**2))
    window = window / window.sum()
    moments = torch.cat([first, second, first * first, second * second, first * second], -1)  # [H, W, 15]
    planes = moments.permute(2, 0, 1)[:, None]
    planes = conv2d(conv2d(planes, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))
    mean1, mean2, square1, square2, product = planes[:, 0].permute(1, 2, 0).split(3, -1)
    variance1, variance2 = square1 - mean1 * mean1, square2 - mean2 * mean2
    covariance = product - mean1 * mean2
    luminance = (2 * mean1 * mean2 + C1) / (mean1 * mean1 + mean2 * mean2 + C1)
    return luminance * (2 * covariance + C2) / (variance1 + variance2 + C2)


def _mean(values: Tensor, kept: Tensor) -> Tensor:
    """Mean of values [H, W, 3] over the kept pixels [H, W] and the channels; zero where none is kept."""
    total = (values * kept[..., None]).sum()
    return total / (values.shape[-1] * kept.sum()).clamp(min=1)
