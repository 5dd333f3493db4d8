"""The plain photometric loss of a round as a value, so that a backend may look inside and fuse it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.ops.layout import Cameras, Image, ImageGradients

Fusing = Literal["auto", "on", "off"]
"""Whether a GPU forms image, loss and gradient rows in one kernel: where that is known to be faster, always, never."""


@dataclass(frozen=True)
class PhotometricLoss:
    """``ops.loss`` with all its arguments but the image; called with one, it returns losses [V] and their gradient."""

    target: Tensor  # [V, H, W, 3 or 4] uint8 (0 to 255) or float (0 to 1)
    background: Tensor  # [V, 3] colour, 0 to 1
    cameras: Cameras
    ssim_lambda: float = 0.2
    mask: Tensor | None = None  # [V, H, W] uint8 or bool, non-zero where a pixel counts
    fusing: Fusing = "auto"

    def __call__(self, image: Image) -> tuple[Tensor, ImageGradients]:
        return ops.loss(image, self.target, self.background, self.cameras, self.ssim_lambda, self.mask)
