"""Quality of a rendered view against the photo: PSNR, SSIM and, where its weights are at hand, LPIPS."""

from __future__ import annotations

from pathlib import Path

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor


class Lpips:
    """LPIPS (Zhang et al. 2018, AlexNet), built at its first use and never downloaded.

    torchmetrics ships the linear layers; the AlexNet backbone is an ImageNet checkpoint that torchvision keeps in
    torch's hub folder. Where that file is missing, ``__call__`` returns None and one line says how to get it.
    """

    BACKBONE = "alexnet-owt-7be5be79.pth"

    def __init__(self) -> None:
        self._network: torch.nn.Module | None = None
        self._missing = False

    def __call__(self, image: Tensor, target: Tensor) -> float | None:
        """Distance of two images [1, 3, H, W] in 0..1, or None without weights."""
        if self._missing:
            return None
        if self._network is None:
            weights = Path(torch.hub.get_dir()) / "checkpoints" / self.BACKBONE
            if not weights.is_file():
                self._missing = True
                CONSOLE.log(
                    f"LPIPS is left out: its AlexNet weights are not at {weights}. Place {self.BACKBONE} there "
                    "(torchvision's alexnet, IMAGENET1K_V1) to have it computed."
                )
                return None
            from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

            self._network = LearnedPerceptualImagePatchSimilarity(normalize=True).to(image.device)
        return float(self._network.to(image.device)(image, target))


def psnr(image: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Peak signal-to-noise ratio in dB of images [..., H, W, 3] in 0..1, over kept pixels (mask [..., H, W])."""
    error = (image - target).square()
    if mask is None:
        mse = error.mean()
    else:
        weight = mask.to(error.dtype)[..., None]
        mse = (error * weight).sum() / (3 * weight.sum()).clamp_min(1)
    return -10 * torch.log10(mse.clamp_min(1e-12))


def view_metrics(
    image: Tensor, target: Tensor, ssim: torch.nn.Module, lpips: Lpips, prefix: str = ""
) -> dict[str, float]:
    """PSNR, SSIM (if both sides reach the 11 px window) and LPIPS (if available) of images [1, 3, H, W] in 0..1."""
    metrics = {f"{prefix}psnr": float(psnr(image, target))}
    if min(image.shape[-2:]) >= 11:
        metrics[f"{prefix}ssim"] = float(ssim(target, image))
    distance = lpips(image, target) if min(image.shape[-2:]) >= 64 else None
    if distance is not None:
        metrics[f"{prefix}lpips"] = distance
    return metrics
