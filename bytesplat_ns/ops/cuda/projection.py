"""Projection and its derivative (``csrc/cuda/project.cu``, ``project_backward.cu``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import (
    RECORD_WIDTH,
    AdamStep,
    Cameras,
    GaussianGradients,
    Gaussians,
    Lag,
    Records,
    RenderSettings,
)
from bytesplat_ns.ops.nvrtc import Program

from .buffers import HALTED, RECORD_STRIDE, RECORDS, Capacity, DeviceRecords, ids_ascend, on_device

FORWARD = Program("project.cu")
BACKWARD = Program("project_backward.cu")
STARTS = Program("find_starts.cu")
THREADS = 128
POSE_SUMS = 64
"""So many sums of pose gradients grow side by side: all warps adding to one would stand in line."""

record_capacity = Capacity(2**31 - 1, "pairs of a view and a visible Gaussian")


def project(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> Records:
    """Records of the pairs that can reach a pixel; see ``ops.reference.project``. Waits for their number."""
    while True:
        capacity = min(len(cameras) * len(gaussians), record_capacity(gaussians.device))
        records = project_ahead(gaussians, cameras, settings, capacity)
        state = records.state.tolist()
        record_capacity.learn(gaussians.device, state[RECORDS])
        if not state[HALTED]:
            return records.first(state[RECORDS])


def project_ahead(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings, capacity: int) -> DeviceRecords:
    """The same into buffers of ``capacity`` rows, without waiting for their number."""
    device, stored = gaussians.device, gaussians.features_rest.shape[1]
    blocks_per_view = -(-len(gaussians) // THREADS)
    blocks = len(cameras) * blocks_per_view
    state, counter, lookback = torch.zeros(3 + 1 + blocks, dtype=torch.int64, device=device).split((3, 1, blocks))
    ids = torch.empty(capacity, dtype=torch.int64, device=device)
    ascending = ids_ascend(gaussians.ids)
    if not ascending:
        ids.fill_(torch.iinfo(torch.int64).max)  # sorted by id, the rows in use come first
    records = DeviceRecords(
        table=torch.empty(capacity, RECORD_STRIDE, device=device)[:, :RECORD_WIDTH],
        gaussian=torch.empty(capacity, dtype=torch.int32, device=device),
        view=torch.empty(capacity, dtype=torch.int32, device=device),
        radius=torch.empty(capacity, device=device),
        ids=ids,
        state=state,
        ascending=ascending,
    )
    degree = used_degree(settings.sh_degree, stored)
    kernel = FORWARD.kernel("project", SH_DEGREE=degree, SH_STORED=stored, ANTIALIASED=settings.antialiased)
    kernel(
        blocks,
        THREADS,
        *parameters_of(gaussians).values(),
        gaussians.ids,
        len(gaussians),
        blocks_per_view,
        cameras.viewmats.detach().contiguous(),
        cameras.intrinsics.contiguous(),
        cameras.sizes.contiguous(),
        settings.near,
        settings.far,
        settings.dilation,
        records.table,
        records.gaussian,
        records.view,
        records.radius,
        records.ids,
        capacity,
        counter.view(torch.int32),
        lookback,
        records.state,
    )
    return records


def project_backward(
    gaussians: Gaussians,
    cameras: Cameras,
    settings: RenderSettings,
    records: Records,
    rows: Tensor,
    squares: bool = False,
) -> GaussianGradients:
    """Gradients of the trained parameters and of the poses; see ``ops.reference.project_backward``."""
    parameters = parameters_of(gaussians)
    gradients, square_sums = (
        {name: torch.empty_like(parameter) for name, parameter in parameters.items() if wanted}
        for wanted in (True, squares)
    )
    poses = torch.zeros(POSE_SUMS, len(cameras), 4, 4, device=gaussians.device)
    outputs = [(parameters[name], gradient, square_sums.get(name), None) for name, gradient in gradients.items()]
    _project_backward(gaussians, cameras, settings, records, rows, outputs, poses, None, squares=squares)
    return GaussianGradients(**gradients, viewmats=poses.sum(0), squares=square_sums or None)


def project_backward_adam(
    gaussians: Gaussians,
    cameras: Cameras,
    settings: RenderSettings,
    records: Records,
    rows: Tensor,
    moments: Mapping[str, tuple[Tensor, Tensor]],
    step: AdamStep,
    regularizers: Mapping[str, Tensor],
    poses: bool,
    lag: Lag | None = None,
) -> Tensor | None:
    """``project_backward`` and a step of ``adam`` of all six parameters in one; see ``fused``."""
    outputs = []
    for name in Gaussians.PARAMETERS:
        parameter, regularizer = getattr(gaussians, name).detach(), regularizers.get(name)
        if regularizer is not None:
            regularizer = regularizer.expand_as(parameter).contiguous()
        output = parameter, *moments[name], regularizer
        assert all(t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in output)
        outputs.append(output)
    assert step.table is not None, "the step is on the device (optimizer.place)"
    sums = torch.zeros(POSE_SUMS, len(cameras), 4, 4, device=gaussians.device) if poses else None
    squares = len(cameras) > 1
    _project_backward(gaussians, cameras, settings, records, rows, outputs, sums, step.table, lag, squares)
    return None if sums is None else sums.sum(0)


def _project_backward(
    gaussians: Gaussians,
    cameras: Cameras,
    settings: RenderSettings,
    records: Records,
    rows: Tensor,
    outputs: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
    poses: Tensor | None,
    adam: Tensor | None,
    lag: Lag | None = None,
    squares: bool = False,
) -> None:
    """Both forms of the kernel: ``outputs`` are (parameter, gradient, squares, None) or (parameter, moments, extra)."""
    records, stored = on_device(records), gaussians.features_rest.shape[1]
    if rows.stride(1) != 1 or rows.stride(0) % 4:
        rows = torch.nn.functional.pad(rows[:, :RECORD_WIDTH], (0, RECORD_STRIDE - RECORD_WIDTH))
    views, blocks_per_view = len(cameras), -(-len(gaussians) // THREADS)
    starts = find_starts(records, blocks_per_view, views)
    switches = {
        "SH_DEGREE": used_degree(settings.sh_degree, stored),
        "SH_STORED": stored,
        "ANTIALIASED": settings.antialiased,
        "MULTI_VIEW": views > 1,
        "SQUARES": squares,
        "POSES": poses is not None,
        "FUSED": adam is not None,
        "DEFERRED": lag is not None,
    }
    BACKWARD.kernel("project_backward", **switches)(
        blocks_per_view,
        THREADS,
        *(value for output in outputs for value in output),
        len(gaussians),
        adam,
        cameras.viewmats.detach().contiguous(),
        cameras.intrinsics.contiguous(),
        cameras.sizes.contiguous(),
        views,
        blocks_per_view,
        settings.dilation,
        records.table,
        rows,
        rows.stride(0),
        records.gaussian,
        starts,
        poses,
        None if lag is None else lag.caught_up,
        None if lag is None else lag.recorded,
        records.state,
    )


def find_starts(records: DeviceRecords, blocks_per_view: int, views: int) -> Tensor:
    """[views * blocks_per_view + 1] int64: the first record of each view and block of Gaussians, or of a later one."""
    starts = torch.zeros(views * blocks_per_view + 1, dtype=torch.int64, device=records.table.device)
    STARTS.kernel("find_starts")(
        len(records) // THREADS + 1,
        THREADS,
        records.gaussian,
        records.view,
        blocks_per_view,
        views,
        starts,
        records.state,
    )
    return starts


def parameters_of(gaussians: Gaussians) -> dict[str, Tensor]:
    """The trained parameters, free of autograd and in rows without gaps."""
    return {name: getattr(gaussians, name).detach().contiguous() for name in Gaussians.PARAMETERS}


def used_degree(degree: int, stored: int) -> int:
    """Degree of the harmonics in use: that of the settings, or the one there are coefficients for."""
    return min(degree, round((stored + 1) ** 0.5) - 1)
