"""Rasterization, photometric loss and the derivative of both in one kernel (``csrc/cuda/fused.cu``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import (
    ROW_WIDTH,
    ROW_WIDTH_WITH_STATISTICS,
    TILE,
    Cameras,
    Image,
    Records,
    RenderSettings,
    TileLists,
)
from bytesplat_ns.ops.nvrtc import Program, capability
from bytesplat_ns.ops.photometric import PhotometricLoss
from bytesplat_ns.ops.residency import QUARTERS, Budget, budget

from .buffers import DeviceImage, on_device
from .loss import as_bytes, kept_counts, loss_switches

FUSED = Program("fused.cu")
WARP = 32
PLANES, GAP, PLANE_SLACK = 15, 8, 32
SUMS = 32


def needed(cameras: Cameras) -> int:
    """Tiles that must be worked on at a time so that none waits for one which has not begun (``fused.cu``)."""
    return 2 * min(cameras.tiles_x, cameras.tiles_y) + 3


def possible(device: torch.device, cameras: Cameras, settings: RenderSettings, exact: bool = False) -> bool:
    """Whether the GPU works on enough tiles at a time, even if other kernels hold half of it."""
    return needed(cameras) <= budget(device, settings.statistics, exact).resident // 2


FASTER: frozenset[tuple[int, int]] = frozenset()
"""Compute capabilities of the GPUs on which the one kernel was measured to be faster than the three (see
``benchmarks/results``). So far none: it reads less, but its warps wait for one another."""


def chosen(
    device: torch.device, cameras: Cameras, settings: RenderSettings, loss: PhotometricLoss, exact: bool = False
) -> bool:
    """Whether to use the kernel: as ``loss`` demands or, by default, where it is faster and possible."""
    if loss.fusing == "auto":
        return capability(device) in FASTER and possible(device, cameras, settings, exact)
    return loss.fusing == "on"


def rasterize_photometric(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    loss: PhotometricLoss,
    *,
    exact: bool = False,
    reads: Tensor | None = None,
) -> tuple[Image, Tensor, Tensor]:
    """``rasterize``, ``loss`` and ``rasterize_backward`` in one launch.

    Args:
        exact: as in ``rasterize_backward``.
        reads: [V, tiles x 4, 3] int32. If given, filled for each 8 x 8 pixels with how many records the forward pass
            blends, how many of them are kept on chip, and how many the backward pass goes through.

    Returns:
        The image, without its depth; the views' losses [V]; the gradient rows.

    Raises:
        ValueError: the image is so large that tiles could wait for one another for ever on this GPU.
    """
    records = on_device(records)
    device, views = records.table.device, len(cameras)
    tile_count = views * cameras.tiles_x * cameras.tiles_y
    if not possible(device, cameras, settings, exact):
        raise ValueError(
            f"The fused rasterizer needs {2 * needed(cameras)} tiles of 16 x 16 pixels at a time for images of "
            f"{cameras.width} x {cameras.height}; this GPU has room for "
            f"{budget(device, settings.statistics, exact).resident}. Leave fused-rasterizer off or to itself."
        )
    room = budget(device, settings.statistics, exact)
    target, sizes = as_bytes(loss.target), cameras.sizes.contiguous()
    counts = kept_counts(loss.mask, loss.target, sizes)
    image = DeviceImage(
        torch.empty(views, cameras.height, cameras.width, 3, device=device),
        None,
        torch.empty(views, cameras.height, cameras.width, device=device),
        records.state,
    )
    plane = (cameras.tiles_x * TILE + GAP) * cameras.tiles_y * TILE + PLANE_SLACK
    planes = torch.empty(views * PLANES * plane, device=device)
    # One allocation of zeros: sums [V, SUMS, 2] of doubles, then words: tickets [1 + V], progress [tiles].
    doubles = views * SUMS * 2
    zeros = torch.zeros(doubles + (2 + views + tile_count) // 2, dtype=torch.int64, device=device)
    sums, words = zeros[:doubles].view(torch.float64), zeros[doubles:].view(torch.int32)
    values = torch.empty(views, device=device)
    width = ROW_WIDTH_WITH_STATISTICS if settings.statistics else ROW_WIDTH
    rows = torch.zeros(len(records), -(-width // 4) * 4, device=device)
    FUSED.kernel("rasterize_photometric", **fused_constants(room, settings, loss, exact, reads is not None))(
        tile_count,
        QUARTERS * WARP,
        records.table,
        tiles.records,
        tiles.offsets,
        sizes,
        cameras.width,
        cameras.height,
        cameras.tiles_x,
        cameras.tiles_y,
        target,
        None if loss.mask is None else loss.mask.contiguous(),
        loss.background.float().contiguous(),
        loss.ssim_lambda,
        counts,
        image.rgb,
        image.transmittance,
        planes,
        words[1 + views :],
        words[: 1 + views],
        sums,
        values,
        rows,
        reads,
        records.state,
    )
    return image, values, rows[:, :width]


def fused_constants(
    room: Budget, settings: RenderSettings, loss: PhotometricLoss, exact: bool, count_reads: bool
) -> dict[str, int]:
    """Constants of the kernel."""
    return loss_switches(loss.target, loss.mask) | {
        "STOP_ADD": settings.stop == "add",
        "STATISTICS": settings.statistics,
        "SPLIT": exact,
        "UNROLL": 2,
        "BLOCKS": room.blocks,
        "SLOTS": room.slots,
        "COUNT_READS": count_reads,
    }


@dataclass(frozen=True)
class Residency:
    """How much of a round's lists stayed on chip between the two directions."""

    budget: int  # records of 8 x 8 pixels
    tiles_within: float  # share of tiles whose lists fit, all four of them
    median: int  # records that 8 x 8 pixels blend
    percentile_95: int
    longest: int
    reads_on_chip: float  # share of the backward pass's records that were not read again

    def __str__(self) -> str:
        return (
            f"{self.tiles_within:.1%} of tiles within the budget of {self.budget} records of 8 x 8 pixels "
            f"(median {self.median}, 95 % {self.percentile_95}, longest {self.longest}), "
            f"{self.reads_on_chip:.1%} of the backward pass's records from on chip"
        )


def residency(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    loss: PhotometricLoss,
    *,
    exact: bool = False,
) -> tuple[Residency, Tensor]:
    """What ``count_reads`` says, and its ``reads``."""
    reads, (on_chip, used) = count_reads(records, tiles, cameras, settings, loss, exact=exact)
    queued, kept, _ = reads.unbind(-1)
    lengths = queued.flatten().sort().values
    found = Residency(
        budget=budget(records.table.device, settings.statistics, exact).records,
        tiles_within=float((kept == queued).view(-1, QUARTERS).all(1).float().mean()),
        median=int(lengths[len(lengths) // 2]),
        percentile_95=int(lengths[int(0.95 * (len(lengths) - 1))]),
        longest=int(lengths[-1]),
        reads_on_chip=float(on_chip / used.clamp(min=1)),
    )
    return found, reads


def count_reads(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    loss: PhotometricLoss,
    *,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """``reads`` of ``rasterize_photometric``, by running the kernel once more; and [2] int64, records that the backward
    pass finds on chip, and all that it goes through."""
    quarters = cameras.tiles_x * cameras.tiles_y * QUARTERS
    reads = torch.zeros(len(cameras), quarters, 3, dtype=torch.int32, device=records.table.device)
    rasterize_photometric(records, tiles, cameras, settings, loss, exact=exact, reads=reads)
    _, kept, used = reads.unbind(-1)
    return reads, torch.stack([torch.minimum(kept, used).sum(), used.sum()])


def by_tile(reads: Tensor, cameras: Cameras) -> Tensor:
    """What the kernel counted, [V, tiles x 4, 3] in its own order of tiles, in that of tile lists: [tiles, 4, 3]."""
    columns, rows = cameras.tiles_x, cameras.tiles_y
    if rows < columns:  # it goes down the shorter side
        return reads.view(-1, columns, rows, QUARTERS, 3).transpose(1, 2).reshape(-1, QUARTERS, 3)
    return reads.view(-1, QUARTERS, 3)
