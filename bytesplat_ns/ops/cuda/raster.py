"""Rasterization, its derivative, and how much of the lists it takes (``csrc/cuda/rasterize.cu``,
``rasterize_backward.cu``, ``effective_lengths.cu``)."""

from __future__ import annotations

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import (
    ROW_WIDTH,
    ROW_WIDTH_WITH_STATISTICS,
    Cameras,
    Image,
    ImageGradients,
    Records,
    RenderSettings,
    TileLists,
)
from bytesplat_ns.ops.nvrtc import Program
from bytesplat_ns.ops.residency import QUARTERS

from .buffers import DeviceImage, on_device

FORWARD = Program("rasterize.cu")
BACKWARD = Program("rasterize_backward.cu")
LENGTHS = Program("effective_lengths.cu")
THREADS = 32
FORWARD_SHAPE = {"UNROLL": 2}


def rasterize(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    interval: Tensor | None = None,
) -> Image:
    """Blends each tile's list front to back; see ``ops.reference.rasterize``."""
    records = on_device(records)
    shape, device = (len(cameras), cameras.height, cameras.width), records.table.device
    parts = (torch.empty(*shape, *channels, device=device) for channels in ((3,), (), ()))
    image = DeviceImage(*parts, state=records.state)
    FORWARD.kernel("rasterize", **FORWARD_SHAPE, **_switches(settings, interval))(
        _tiles(cameras) * QUARTERS,
        THREADS,
        *_inputs(records, tiles, cameras, interval),
        image.rgb,
        image.depth,
        image.transmittance,
        records.state,
    )
    return image


def rasterize_backward(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    image: Image,
    gradients: ImageGradients,
    interval: Tensor | None = None,
    *,
    exact: bool = True,
) -> Tensor:
    """Gradient rows of the records; see ``ops.reference.rasterize_backward``.

    Args:
        exact: products of sums over pixels to 16 bits (error some 1e-6, norm-wise) instead of 11 (some 1e-4), which is
            faster. Gradients of depth are always exact.
    """
    records = on_device(records)
    width = ROW_WIDTH_WITH_STATISTICS if settings.statistics else ROW_WIDTH
    rows = torch.zeros(len(records), -(-width // 4) * 4, device=records.table.device)
    switches = _switches(settings, interval)
    constants = backward_constants(switches, settings.statistics, gradients.depth is not None, exact)
    BACKWARD.kernel("rasterize_backward", **constants)(
        _tiles(cameras) * QUARTERS,
        THREADS,
        *_inputs(records, tiles, cameras, interval),
        image.rgb,
        image.depth,
        image.transmittance,
        gradients.rgb.contiguous(),
        None if gradients.depth is None else gradients.depth.contiguous(),
        None if gradients.transmittance is None else gradients.transmittance.contiguous(),
        rows,
        records.state,
    )
    return rows[:, :width]


def effective_lengths(records: Records, tiles: TileLists, cameras: Cameras, settings: RenderSettings) -> Tensor:
    """How far down each tile's list something is still seen; see ``ops.reference.effective_lengths``."""
    records = on_device(records)
    lengths = torch.zeros(_tiles(cameras), dtype=torch.int32, device=records.table.device)
    LENGTHS.kernel("effective_lengths", UNROLL=1, **_switches(settings, None))(
        _tiles(cameras) * QUARTERS,
        THREADS,
        records.table,
        tiles.records,
        tiles.offsets,
        cameras.sizes.contiguous(),
        cameras.tiles_x,
        cameras.tiles_y,
        lengths,
    )
    return lengths


def backward_constants(switches: dict[str, int], statistics: bool, depth: bool, exact: bool) -> dict[str, int]:
    """Constants of the backward kernel: as many ``BLOCKS`` as a multiprocessor holds without spilling registers."""
    exact = exact or depth
    more = {"STATISTICS": statistics, "DEPTH_GRADIENT": depth, "SPLIT": exact}
    return switches | more | {"UNROLL": 2, "BLOCKS": 16 if statistics and exact else 24}


def _switches(settings: RenderSettings, interval: Tensor | None) -> dict[str, int]:
    return {"STOP_ADD": settings.stop == "add", "INTERVAL": interval is not None}


def _tiles(cameras: Cameras) -> int:
    return len(cameras) * cameras.tiles_y * cameras.tiles_x


def _inputs(
    records: Records, tiles: TileLists, cameras: Cameras, interval: Tensor | None
) -> tuple[Tensor | int | None, ...]:
    """What both directions are given first."""
    return (
        records.table,
        tiles.records,
        tiles.offsets,
        cameras.sizes.contiguous(),
        cameras.width,
        cameras.height,
        cameras.tiles_x,
        cameras.tiles_y,
        None if interval is None else interval.contiguous(),
    )
