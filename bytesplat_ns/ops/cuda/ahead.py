"""From Gaussians to gradient rows without an idle GPU.

How many records and pairs there are is known on the device first. ``project`` and ``bin`` wait for it, which leaves the
GPU without work meanwhile. Here all stages up to the gradient rows are handed to the GPU at once, with buffers as long
as the last counts suggest; the host reads the counts while the rasterizer runs, and repeats the stages if something did
not fit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, Differentiated, Gaussians, Image, ImageGradients, RenderSettings

from .binning import bin_ahead, pair_capacity
from .buffers import HALTED, PAIRS, RECORDS
from .projection import project_ahead, record_capacity
from .raster import rasterize, rasterize_backward

Loss = Callable[[Image], tuple[Tensor, ImageGradients]]
"""What to minimise: from an image to the views' losses [V] and their gradient; waits for nothing."""


def differentiate(
    gaussians: Gaussians, cameras: Cameras, settings: RenderSettings, loss: Loss, *, exact: bool = False
) -> Differentiated:
    """``project``, ``bin``, ``rasterize``, ``loss`` and ``rasterize_backward`` in one go, with the same results.

    Args:
        loss: called again if the stages have to be repeated.
        exact: as in ``rasterize_backward``. A photometric gradient is noisier than what it costs.
    """
    device = gaussians.device
    while True:
        records_fit = min(len(cameras) * len(gaussians), record_capacity(device))
        records = project_ahead(gaussians, cameras, settings, records_fit)
        tiles = bin_ahead(records, cameras, pair_capacity(device))
        counts = _Counts(records.state)
        image = rasterize(records, tiles, cameras, settings)
        losses, gradients = loss(image)
        rows = rasterize_backward(records, tiles, cameras, settings, image, gradients, exact=exact)

        state = counts.read()
        record_capacity.learn(device, state[RECORDS])
        pair_capacity.learn(device, state[PAIRS])
        if not state[HALTED]:
            tiles.records = tiles.records[: state[PAIRS]]
            return Differentiated(records.first(state[RECORDS]), tiles, image, losses, rows[: state[RECORDS]])


class _Counts:
    """A step's state on its way to the host."""

    def __init__(self, state: Tensor) -> None:
        self.arrived = None
        if state.device.type == "cpu":
            self.state = state
            return
        self.state = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
        self.state.copy_(state, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def read(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.state.tolist()
