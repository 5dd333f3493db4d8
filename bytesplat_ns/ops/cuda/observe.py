"""Statistics of density control (``csrc/cuda/observe.cu``)."""

from __future__ import annotations

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, Observations, Records
from bytesplat_ns.ops.nvrtc import Program

from .buffers import on_device

OBSERVE = Program("observe.cu")
THREADS = 256


def observe(records: Records, rows: Tensor, cameras: Cameras, observations: Observations, absgrad: bool) -> None:
    """Adds a round to the statistics, in place; see ``ops.reference.observe``."""
    records = on_device(records)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    OBSERVE.kernel("observe", ABSOLUTE=absgrad)(
        -(-len(records) // THREADS),
        THREADS,
        rows,
        rows.stride(0),
        records.gaussian,
        records.view,
        records.radius,
        cameras.sizes.contiguous(),
        observations.gradient,
        observations.views,
        observations.radius.view(torch.int32),
        records.state,
    )
