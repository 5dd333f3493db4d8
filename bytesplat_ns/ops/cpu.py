"""The stages on the CPU: C++ kernels (csrc/cpu) in a shared library, called through ctypes.

Results do not depend on the number of threads, which is torch's (``torch.set_num_threads``).
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from .cpu_codec import decode_rows, encode_rows
from .cpu_library import Structure, available, call, check, members
from .layout import (
    RECORD_WIDTH,
    ROW_WIDTH,
    ROW_WIDTH_WITH_STATISTICS,
    Cameras,
    GaussianGradients,
    Gaussians,
    Image,
    ImageGradients,
    Records,
    RenderSettings,
    TileLists,
)
from .reference import observe, shake

__all__ = [
    "adam",
    "available",
    "bin",
    "decode_rows",
    "effective_lengths",
    "encode_rows",
    "loss",
    "observe",
    "project",
    "project_backward",
    "rasterize",
    "rasterize_backward",
    "shake",
]

# Structures of csrc/cpu, their fields in the same order ---------------------------------------------------------------


class _ProjectInput(Structure):
    _fields_ = (
        *members(c_int64, "count"),
        *members(c_void_p, "means", "quats", "scales", "opacities", "features_dc", "features_rest", "ids"),
        *members(c_int, "stored_functions", "views"),
        *members(c_void_p, "viewmats", "intrinsics", "sizes"),
        *members(c_int, "sh_degree", "antialiased"),
        *members(c_float, "near_plane", "far_plane", "dilation"),
    )


class _RecordOutput(Structure):
    _fields_ = members(c_void_p, "table", "gaussian", "view", "radius", "ids")


class _RecordInput(Structure):
    _fields_ = (
        *members(c_void_p, "table", "gaussian", "view", "rows"),
        *members(c_int64, "count"),
        *members(c_int, "row_width"),
    )


class _GradientOutput(Structure):
    _fields_ = members(c_void_p, *Gaussians.PARAMETERS, *(f"square_{n}" for n in Gaussians.PARAMETERS), "viewmats")


class _BinInput(Structure):
    _fields_ = (
        *members(c_int, "width", "height"),
        *members(c_void_p, "sizes", "table", "view", "ids"),
        *members(c_int64, "record_count"),
    )


class _RasterInput(Structure):
    _fields_ = (
        *members(c_int, "views", "width", "height"),
        *members(c_void_p, "sizes", "table"),
        *members(c_int64, "record_count"),
        *members(c_void_p, "offsets", "records", "interval"),
        *members(c_int, "stop"),
    )


class _BackwardInput(Structure):
    _fields_ = (
        *members(c_void_p, "pair", "pair_offsets", "rgb", "depth", "transmittance"),
        *members(c_void_p, "d_rgb", "d_depth", "d_transmittance"),
        *members(c_int, "statistics"),
    )


class _LossInput(Structure):
    _fields_ = (
        *members(c_int, "views", "width", "height"),
        *members(c_void_p, "sizes", "rgb", "transmittance", "target"),
        *members(c_int, "target_is_uint8", "target_channels"),
        *members(c_void_p, "background", "mask"),
        *members(c_float, "ssim_lambda"),
    )


class _LossOutput(Structure):
    _fields_ = members(c_void_p, "values", "d_rgb", "d_transmittance")


class _AdamStep(Structure):
    _fields_ = members(c_float, "first_rate", "second_rate", "step_size", "root_correction", "eps")


# The stages ----------------------------------------------------------------------------------------------------------


def project(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> Records:
    """Records of the Gaussians that can reach a pixel; see ``reference.project``."""
    count, views = len(gaussians), len(cameras)
    room = count * views
    table = torch.empty(room, RECORD_WIDTH)
    gaussian = torch.empty(room, dtype=torch.int32)
    view = torch.empty(room, dtype=torch.int32)
    radius = torch.empty(room)
    ids = torch.empty(room, dtype=torch.int64)
    out = _RecordOutput(table=table, gaussian=gaussian, view=view, radius=radius, ids=ids)
    visible = call("project", _project_input(gaussians, cameras, settings), out)
    return Records(table[:visible], gaussian[:visible], view[:visible], radius[:visible], ids[:visible])


def project_backward(
    gaussians: Gaussians,
    cameras: Cameras,
    settings: RenderSettings,
    records: Records,
    rows: Tensor,
    squares: bool = False,
) -> GaussianGradients:
    """Gradients of the trained parameters and of the poses, summed over views; see ``reference.project_backward``."""
    _check_records(records)
    check("records.gaussian", records.gaussian, torch.int32, len(records))
    if rows.shape[-1:] not in ((ROW_WIDTH,), (ROW_WIDTH_WITH_STATISTICS,)):
        raise ValueError(
            f"rows: expected {ROW_WIDTH} columns, or {ROW_WIDTH_WITH_STATISTICS} with statistics; "
            f"found shape {list(rows.shape)}"
        )
    check("rows", rows, torch.float32, len(records), rows.shape[-1])
    source = _RecordInput(
        table=records.table,
        gaussian=records.gaussian,
        view=records.view,
        rows=rows,
        count=len(records),
        row_width=rows.shape[-1],
    )
    sums, square_sums = (
        {name: torch.empty(getattr(gaussians, name).shape) for name in Gaussians.PARAMETERS if wanted}
        for wanted in (True, squares)
    )
    gradients = GaussianGradients(**sums, viewmats=torch.empty(len(cameras), 4, 4), squares=square_sums or None)
    pointers = {f"square_{name}": square for name, square in square_sums.items()}
    out = _GradientOutput(**sums, **pointers, viewmats=gradients.viewmats)
    call("project_backward", _project_input(gaussians, cameras, settings), source, out)
    return gradients


def bin(records: Records, cameras: Cameras) -> TileLists:
    """Which records reach which tile, near to far; see ``reference.bin``."""
    _check_records(records)
    source = _BinInput(
        width=cameras.width,
        height=cameras.height,
        sizes=_sizes(cameras),
        table=records.table,
        view=records.view,
        ids=records.ids,
        record_count=len(records),
    )
    pair_offsets = torch.empty(len(records) + 1, dtype=torch.int64)
    call("bin_count", source, pair_offsets)
    tiles, pairs = len(cameras) * cameras.tiles_y * cameras.tiles_x, int(pair_offsets[-1])
    lists = TileLists(
        offsets=torch.empty(tiles + 1, dtype=torch.int64),
        records=torch.empty(pairs, dtype=torch.int32),
        pair=torch.empty(pairs, dtype=torch.int64),
        pair_offsets=pair_offsets,
    )
    call("bin_fill", source, pair_offsets, c_int64(tiles), lists.offsets, lists.records, lists.pair)
    return lists


def rasterize(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    interval: Tensor | None = None,
) -> Image:
    """Blends each tile's list front to back; see ``reference.rasterize``."""
    shape = (len(cameras), cameras.height, cameras.width)
    image = Image(torch.empty(*shape, 3), torch.empty(shape), torch.empty(shape))
    source = _raster_input(records, tiles, cameras, settings, interval)
    call("rasterize", source, image.rgb, image.depth, image.transmittance)
    return image


def rasterize_backward(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    image: Image,
    gradients: ImageGradients,
    interval: Tensor | None = None,
) -> Tensor:
    """Gradient rows of the records; see ``reference.rasterize_backward``."""
    shape = (len(cameras), cameras.height, cameras.width)
    for name, part in (("image", image), ("gradients", gradients)):
        check(f"{name}.rgb", part.rgb, torch.float32, *shape, 3)
        for plane in ("depth", "transmittance"):
            if (values := getattr(part, plane)) is not None:
                check(f"{name}.{plane}", values, torch.float32, *shape)
    back = _BackwardInput(
        pair=tiles.pair,
        pair_offsets=tiles.pair_offsets,
        rgb=image.rgb,
        depth=image.depth,
        transmittance=image.transmittance,
        d_rgb=gradients.rgb,
        d_depth=gradients.depth,
        d_transmittance=gradients.transmittance,
        statistics=settings.statistics,
    )
    rows = torch.empty(len(records), ROW_WIDTH_WITH_STATISTICS if settings.statistics else ROW_WIDTH)
    call("rasterize_backward", _raster_input(records, tiles, cameras, settings, interval), back, rows)
    return rows


def effective_lengths(records: Records, tiles: TileLists, cameras: Cameras, settings: RenderSettings) -> Tensor:
    """How far down each tile's list something is still seen; see ``reference.effective_lengths``."""
    lengths = torch.empty(len(tiles.offsets) - 1, dtype=torch.int32)
    call("effective_lengths", _raster_input(records, tiles, cameras, settings, None), lengths)
    return lengths


def loss(
    image: Image,
    target: Tensor,
    background: Tensor,
    cameras: Cameras,
    ssim_lambda: float = 0.2,
    mask: Tensor | None = None,
) -> tuple[Tensor, ImageGradients]:
    """Photometric loss of each view [V] and its gradient; see ``reference.loss``."""
    shape = (len(cameras), cameras.height, cameras.width)
    check("image.rgb", image.rgb, torch.float32, *shape, 3)
    check("image.transmittance", image.transmittance, torch.float32, *shape)
    check("background", background, torch.float32, len(cameras), 3)
    if target.dtype not in (torch.uint8, torch.float32) or target.shape[-1:] not in ((3,), (4,)):
        raise ValueError(
            f"target: expected [V, H, W, 3 or 4] of uint8 or float32, found {list(target.shape)} of {target.dtype}"
        )
    check("target", target, target.dtype, *shape, target.shape[-1])
    if mask is not None:
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        check("mask", mask, torch.uint8, *shape)
    source = _LossInput(
        views=len(cameras),
        width=cameras.width,
        height=cameras.height,
        sizes=_sizes(cameras),
        rgb=image.rgb,
        transmittance=image.transmittance,
        target=target,
        target_is_uint8=target.dtype == torch.uint8,
        target_channels=target.shape[-1],
        background=background,
        mask=mask,
        ssim_lambda=ssim_lambda,
    )
    values = torch.empty(len(cameras))
    gradients = ImageGradients(torch.empty(*shape, 3), None, torch.empty(shape))
    out = _LossOutput(values=values, d_rgb=gradients.rgb, d_transmittance=gradients.transmittance)
    call("loss", source, out)
    return values, gradients


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
    """One step of Adam, in place; see ``reference.adam``."""
    tensors = {"parameter": parameter, "gradient": gradient, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in (tensors if square is None else tensors | {"square": square}).items():
        check(name, tensor, torch.float32, *parameter.shape)
    if step < 1:
        raise ValueError(f"step: Adam counts steps from 1, found {step}")
    constants = _AdamStep(
        first_rate=1 - beta1,
        second_rate=1 - beta2,
        step_size=lr / (1 - beta1**step),
        root_correction=(1 - beta2**step) ** -0.5,
        eps=eps,
    )
    call("adam", constants, c_int64(parameter.numel()), gradient, square, parameter, exp_avg, exp_avg_sq)


# What comes in -------------------------------------------------------------------------------------------------------


def _sizes(cameras: Cameras) -> Tensor:
    check("cameras.sizes", cameras.sizes, torch.int32, len(cameras), 2)
    return cameras.sizes


def _check_records(records: Records) -> None:
    check("records.table", records.table, torch.float32, len(records), RECORD_WIDTH)
    check("records.view", records.view, torch.int32, len(records))
    check("records.ids", records.ids, torch.int64, len(records))


def _project_input(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> Structure:
    count, views = len(gaussians), len(cameras)
    functions = gaussians.features_rest.shape[1] + 1
    columns = {"means": (3,), "quats": (4,), "scales": (3,), "opacities": (1,), "features_dc": (3,)}
    for name, shape in {**columns, "features_rest": (functions - 1, 3)}.items():
        check(name, getattr(gaussians, name), torch.float32, count, *shape)
    check("ids", gaussians.ids, torch.int64, count)
    check("cameras.viewmats", cameras.viewmats, torch.float32, views, 4, 4)
    check("cameras.intrinsics", cameras.intrinsics, torch.float32, views, 4)
    if not 0 <= settings.sh_degree <= 3:
        raise ValueError(f"settings.sh_degree: expected 0 to 3, found {settings.sh_degree}")
    return _ProjectInput(
        count=count,
        **{name: getattr(gaussians, name) for name in Gaussians.PARAMETERS},
        ids=gaussians.ids,
        stored_functions=functions,
        views=views,
        viewmats=cameras.viewmats,
        intrinsics=cameras.intrinsics,
        sizes=_sizes(cameras),
        sh_degree=settings.sh_degree,
        antialiased=settings.antialiased,
        near_plane=settings.near,
        far_plane=settings.far,
        dilation=settings.dilation,
    )


def _raster_input(
    records: Records, tiles: TileLists, cameras: Cameras, settings: RenderSettings, interval: Tensor | None
) -> Structure:
    _check_records(records)
    pairs = len(tiles.records)
    check("tiles.offsets", tiles.offsets, torch.int64, len(cameras) * cameras.tiles_y * cameras.tiles_x + 1)
    check("tiles.records", tiles.records, torch.int32, pairs)
    check("tiles.pair", tiles.pair, torch.int64, pairs)
    check("tiles.pair_offsets", tiles.pair_offsets, torch.int64, len(records) + 1)
    if interval is not None:
        check("interval", interval, torch.float32, len(cameras), cameras.height, cameras.width, 2)
    return _RasterInput(
        views=len(cameras),
        width=cameras.width,
        height=cameras.height,
        sizes=_sizes(cameras),
        table=records.table,
        record_count=len(records),
        offsets=tiles.offsets,
        records=tiles.records,
        interval=interval,
        stop=settings.stop == "add",
    )
