"""The stages of a training step, run by the backend of the device that their tensors live on.

    project -> bin -> rasterize -> loss -> rasterize_backward -> project_backward -> adam

``layout`` describes what passes between them, ``reference`` says what each of them means. A training step
calls runs of them, which a backend may fuse (``fused``); ``render`` and ``photometric_loss`` wrap them for
torch.autograd, for losses other than ours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layout import (
    Cameras,
    EncodedRows,
    GaussianGradients,
    Gaussians,
    Image,
    ImageGradients,
    Observations,
    Records,
    RenderSettings,
    TileLists,
)


@cache
def backend(device_type: str) -> ModuleType:
    """The module that runs the stages on a type of device: compiled kernels, or else the torch reference."""
    if device_type == "cuda":
        from . import cuda

        return cuda
    if device_type == "cpu":
        from . import cpu

        if cpu.available():
            return cpu
    from . import reference

    logging.getLogger(__name__).warning(
        "No compiled kernels for %s here: bytesplat runs its torch reference, many times slower.",
        device_type,
    )
    return reference


def project(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> Records:
    """What each Gaussian looks like in each view, for the pairs that can reach a pixel."""
    require_addressable(gaussians, cameras)
    return backend(gaussians.device.type).project(gaussians, cameras, settings)


def require_addressable(gaussians: Gaussians, cameras: Cameras) -> None:
    """Records are numbered with 31 bits; a CUDA device counts them before it makes any.

    Raises:
        ValueError: the round could have more records than that.
    """
    if gaussians.device.type != "cuda" and len(gaussians) * len(cameras) >= 2**31:
        raise ValueError(
            f"{len(gaussians):,} Gaussians in a round of {len(cameras)} views could make 2^31 records or more. "
            "Lower --pipeline.datamanager.views-per-round."
        )


def bin(records: Records, cameras: Cameras) -> TileLists:
    """Which records reach which tile, near to far."""
    return backend(records.table.device.type).bin(records, cameras)


def rasterize(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    interval: Tensor | None = None,
) -> Image:
    """Blends the tile lists; ``interval`` [V, H, W, 2] limits a pixel to z_in <= z < z_out, world units."""
    return backend(records.table.device.type).rasterize(records, tiles, cameras, settings, interval)


def loss(
    image: Image,
    target: Tensor,
    background: Tensor,
    cameras: Cameras,
    ssim_lambda: float = 0.2,
    mask: Tensor | None = None,
) -> tuple[Tensor, ImageGradients]:
    """Photometric loss of each view [V] and its gradient; arguments as in ``photometric_loss``."""
    return backend(image.rgb.device.type).loss(image, target, background, cameras, ssim_lambda, mask)


def rasterize_backward(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    image: Image,
    gradients: ImageGradients,
    interval: Tensor | None = None,
) -> Tensor:
    """Gradient rows [M, 10], or [M, 14] with statistics, of the records that ``image`` was made from."""
    module = backend(records.table.device.type)
    return module.rasterize_backward(records, tiles, cameras, settings, image, gradients, interval)


def effective_lengths(records: Records, tiles: TileLists, cameras: Cameras, settings: RenderSettings) -> Tensor:
    """How far down each tile's list something is still seen [tiles] int32: entries up to the last that contributes."""
    return backend(records.table.device.type).effective_lengths(records, tiles, cameras, settings)


def tile_costs(records: Records, tiles: TileLists, lengths: Tensor, budget: int) -> Tensor:
    """Of each record the tiles that list it, those where it is beyond the budget, those over budget [M, 3] int32.

    Asked for a few times in a run, so that plain torch does on every device.
    """
    from . import reference

    return reference.tile_costs(records, tiles, lengths, budget)


def project_backward(
    gaussians: Gaussians,
    cameras: Cameras,
    settings: RenderSettings,
    records: Records,
    rows: Tensor,
    squares: bool = False,
) -> GaussianGradients:
    """Gradients of the trained parameters and of the poses from gradient rows, summed over views.

    Args:
        squares: whether the sums of the squares of each view's gradient are wanted too.
    """
    return backend(gaussians.device.type).project_backward(gaussians, cameras, settings, records, rows, squares)


def encode_rows(
    rows: Tensor, parts: Sequence[int], columns: Sequence[int], precision: torch.dtype = torch.float32
) -> EncodedRows:
    """Gradient rows for several ranks without those that are bitwise zero; see ``reference.encode_rows``.

    Args:
        rows: [M, 10 or 14], part after part.
        parts: rows of each part, M in all.
        columns: those that travel, ascending.
        precision: float32 or bfloat16, to which what travels is rounded.

    Raises:
        ValueError: rows have no such columns, or are fewer or more than those of all parts.
    """
    assert precision in (torch.float32, torch.bfloat16), precision
    if sum(parts) != len(rows) or not 0 <= min(columns) <= max(columns) < rows.shape[1]:
        raise ValueError(f"Rows {list(rows.shape)} have no columns {list(columns)}, or no parts of {list(parts)} rows.")
    return backend(rows.device.type).encode_rows(rows, parts, columns, precision)


def decode_rows(encoded: EncodedRows, parts: Sequence[int], columns: Sequence[int], width: int) -> Tensor:
    """The rows [M, width] from which ``encoded`` came; zero in the columns that did not travel."""
    return backend(encoded.mask.device.type).decode_rows(encoded, parts, columns, width)


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
    """One dense step of Adam, in place; ``step`` counts from 1, ``square`` stands in for that of the gradient."""
    backend(parameter.device.type).adam(
        parameter, gradient, exp_avg, exp_avg_sq, lr=lr, beta1=beta1, beta2=beta2, eps=eps, step=step, square=square
    )


def observe(records: Records, rows: Tensor, cameras: Cameras, observations: Observations, absgrad: bool) -> None:
    """Adds a round's gradient rows with statistics [M, 14] to what density control remembers, in place.

    Args:
        absgrad: take the sum over pixels of absolute gradients instead of the gradient.
    """
    backend(rows.device.type).observe(records, rows, cameras, observations, absgrad)


def shake(gaussians: Gaussians, strength: float, min_opacity: float, *, seed: int, step: int) -> None:
    """Adds noise to the means of faint Gaussians, along their own axes, in place; see ``reference.shake``."""
    backend(gaussians.device.type).shake(gaussians, strength, min_opacity, seed=seed, step=step)


def render(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> tuple[Image, Records]:
    """Image of the Gaussians, differentiable in the six parameters and in ``cameras.viewmats``.

    Returns:
        The image (unclamped, without background) and the records behind it, which carry no gradient.
    """
    parameters = [getattr(gaussians, name) for name in Gaussians.PARAMETERS]
    rgb, depth, transmittance, records = _Render.apply(cameras, settings, gaussians.ids, cameras.viewmats, *parameters)
    return Image(rgb, depth, transmittance), records


def photometric_loss(
    rgb: Tensor,
    transmittance: Tensor,
    target: Tensor,
    background: Tensor,
    cameras: Cameras,
    ssim_lambda: float = 0.2,
    mask: Tensor | None = None,
) -> Tensor:
    """(1 - lambda) L1 + lambda (1 - SSIM) of each view, differentiable in ``rgb`` and ``transmittance``.

    Args:
        rgb: [V, H, W, 3] unclamped colour, without background.
        transmittance: [V, H, W] share of the background that shows through.
        target: [V, H, W, 3 or 4] photo, uint8 (0 to 255) or float (0 to 1); its alpha, if any, composes it
            over the background.
        background: [V, 3] colour, 0 to 1.
        mask: [V, H, W] uint8 or bool, non-zero where a pixel counts.

    Returns:
        [V], one value per view: a round's loss is their sum.
    """
    return _PhotometricLoss.apply(rgb, transmittance, target, background, cameras, ssim_lambda, mask)


class _Render(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cameras: Cameras,
        settings: RenderSettings,
        ids: Tensor,
        viewmats: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Records]:
        records = project(Gaussians(*parameters, ids=ids), cameras, settings)
        tiles = bin(records, cameras)
        image = rasterize(records, tiles, cameras, settings)
        ctx.stages = cameras, settings, ids, records, tiles
        ctx.save_for_backward(image.rgb, image.depth, image.transmittance, viewmats, *parameters)
        ctx.set_materialize_grads(False)
        return image.rgb, image.depth, image.transmittance, records

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        cameras, settings, ids, records, tiles = ctx.stages
        rgb, depth, transmittance, viewmats, *parameters = ctx.saved_tensors
        cameras, settings = replace(cameras, viewmats=viewmats), replace(settings, statistics=False)
        # Autograd hands down expanded tensors (of a sum, a mean); the kernels read memory row by row.
        d_rgb, d_depth, d_transmittance = (None if d is None else d.contiguous() for d in upstream[:3])
        d_rgb = torch.zeros_like(rgb) if d_rgb is None else d_rgb
        gradients = ImageGradients(d_rgb, d_depth, d_transmittance)
        image = Image(rgb, depth, transmittance)
        rows = rasterize_backward(records, tiles, cameras, settings, image, gradients)
        result = project_backward(Gaussians(*parameters, ids=ids), cameras, settings, records, rows)
        return (None, None, None, result.viewmats, *result.parameters().values())


class _PhotometricLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rgb: Tensor,
        transmittance: Tensor,
        target: Tensor,
        background: Tensor,
        cameras: Cameras,
        ssim_lambda: float,
        mask: Tensor | None,
    ) -> Tensor:
        image = Image(rgb, torch.zeros_like(transmittance), transmittance)
        values, gradients = loss(image, target, background, cameras, ssim_lambda, mask)
        ctx.save_for_backward(gradients.rgb, gradients.transmittance)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_values: Tensor) -> tuple[Tensor | None, ...]:
        d_rgb, d_transmittance = ctx.saved_tensors
        per_view = d_values[:, None, None]
        return d_rgb * per_view[..., None], d_transmittance * per_view, None, None, None, None, None
