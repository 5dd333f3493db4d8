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
from .counts import Counts
from .projection import project_ahead, record_capacity
from .raster import rasterize, rasterize_backward

Loss = Callable[[Image], tuple[Tensor, ImageGradients]]
"""What to minimise: from an image to the views' losses [V] and their gradient; waits for nothing."""


def differentiate(
    gaussians: Gaussians, cameras: Cameras, settings: RenderSettings, loss: Loss, *, exact: bool = False
) -> Differentiated:
    """``project``, ``bin``, ``rasterize``, ``loss`` and ``rasterize_backward`` in one go, with the same results.

    While the stages are recorded (``replay``) nothing is known about their counts: buffers come back as long as they
    are, and whoever replays the recording looks whether they were long enough.

    Args:
        loss: called again if the stages have to be repeated.
        exact: as in ``rasterize_backward``. A photometric gradient is noisier than what it costs.
    """
    device = gaussians.device
    while True:
        records_fit = min(len(cameras) * len(gaussians), record_capacity(device))
        records = project_ahead(gaussians, cameras, settings, records_fit)
        tiles = bin_ahead(records, cameras, pair_capacity(device))
        counts = Counts.of_step(device)
        counts.fetch(records.state)
        image = rasterize(records, tiles, cameras, settings)
        losses, gradients = loss(image)
        rows = rasterize_backward(records, tiles, cameras, settings, image, gradients, exact=exact)
        if counts.recorded:
            return Differentiated(records, tiles, image, losses, rows)
        state = counts.read()
        if fitted(state, device):
            tiles.records = tiles.records[: state[PAIRS]]
            return Differentiated(records.first(state[RECORDS]), tiles, image, losses, rows[: state[RECORDS]])


def capacities(device: torch.device) -> tuple[int, int]:
    """Room for records (if there may be as many) and for pairs that ``differentiate`` would make now."""
    return record_capacity(device), pair_capacity(device)


def fitted(state: list[int], device: torch.device) -> bool:
    """Whether a step with these counts took place; capacities learn from them."""
    record_capacity.learn(device, state[RECORDS])
    pair_capacity.learn(device, state[PAIRS])
    return not state[HALTED]
