"""Colours that are moved when a view shows them (``csrc/cuda/catch_up.cu``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import COLOURS, AdamStep, Cameras, Gaussians, Lag, Records, RenderSettings
from bytesplat_ns.ops.nvrtc import Program

from .buffers import on_device
from .projection import parameters_of

CATCH_UP = Program("catch_up.cu")
THREADS = 128


def lag_of(gaussians: int, most_steps: int, device: torch.device) -> Lag:
    """That of Gaussians whose colours have had all steps, with room for a record of so many."""
    return Lag(
        caught_up=torch.zeros(gaussians, dtype=torch.int32, device=device),
        past=[],
        record=torch.zeros(most_steps, 10, device=device),
        fastest=torch.zeros(6, device=device),
        recorded=torch.zeros(1, dtype=torch.int32, device=device),
    )


def catch_up(
    gaussians: Gaussians,
    moments: Mapping[str, tuple[Tensor, Tensor]],
    lag: Lag,
    cameras: Cameras | None,
    settings: RenderSettings,
) -> None:
    """Gives colours the steps on record that they have not had; see ``ops.reference.catch_up``.

    Args:
        cameras: at least the Gaussians that these show are caught up with; None: all.
    """
    parameters, stored = parameters_of(gaussians), gaussians.features_rest.shape[1]
    switches = {"SH_STORED": stored, "ANTIALIASED": settings.antialiased, "EVERYONE": cameras is None}
    views = (None, None, None, 0)
    if cameras is not None:
        tensors = cameras.viewmats.detach(), cameras.intrinsics, cameras.sizes
        views = *(tensor.contiguous() for tensor in tensors), len(cameras)
    CATCH_UP.kernel("catch_up", **switches)(
        -(-len(gaussians) // THREADS),
        THREADS,
        *(parameters[name] for name in ("means", "quats", "scales", "opacities")),
        *(tensor for name in COLOURS for tensor in (parameters[name], *moments[name])),
        len(gaussians),
        lag.caught_up,
        lag.record,
        lag.fastest,
        lag.recorded,
        *views,
        settings.near,
        settings.far,
        settings.dilation,
    )


def put_on_record(lag: Lag, step: AdamStep, records: Records) -> None:
    """The step on these records that has just been launched, unless it halts."""
    CATCH_UP.kernel("record_step", SH_STORED=0, ANTIALIASED=0, EVERYONE=1)(
        1, 32, step.table, lag.record, lag.fastest, lag.recorded, on_device(records).state
    )
