"""From Gaussians to gradient rows without an idle GPU.

How many records and pairs there are is known on the device first. ``project`` and ``bin`` wait for it, which leaves the
GPU without work meanwhile. Here all stages up to the gradient rows are handed to the GPU at once, with buffers as long
as the last counts suggest; the host reads the counts while the rasterizer runs, and repeats the stages if something did
not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bytesplat_ns.ops.fused import Announce, Loss
from bytesplat_ns.ops.layout import Cameras, Differentiated, Gaussians, Records, RenderSettings
from bytesplat_ns.ops.photometric import PhotometricLoss

from . import fused_raster
from .binning import bin_ahead, pair_capacity
from .buffers import HALTED, PAIRS, RECORDS, DeviceRecords, on_device
from .counts import Counts
from .projection import THREADS, find_starts, project_ahead, record_capacity
from .raster import rasterize, rasterize_backward


def differentiate(
    gaussians: Gaussians, cameras: Cameras, settings: RenderSettings, loss: Loss, *, exact: bool = False
) -> Differentiated:
    """``project``, ``bin``, ``rasterize``, ``loss`` and ``rasterize_backward`` in one go, with the same results.

    While the stages are recorded (``replay``) nothing is known about their counts: buffers come back as long as they
    are, and whoever replays the recording looks whether they were long enough.

    Args:
        loss: called again if the stages have to be repeated. A ``PhotometricLoss`` may become one kernel with the
            rasterization and its derivative (``fused_raster``); its image then has no depth.
        exact: as in ``rasterize_backward``. A photometric gradient is noisier than what it costs.
    """
    device = gaussians.device
    while True:
        records_fit = min(len(cameras) * len(gaussians), record_capacity(device))
        records = project_ahead(gaussians, cameras, settings, records_fit)
        result, counts = _from_records(records, cameras, settings, loss, exact)
        if counts.recorded:
            return result
        state = counts.read()
        if fitted(state, device):
            return _trimmed(result, state)


def differentiate_records(
    records: Records, cameras: Cameras, settings: RenderSettings, loss: Loss, *, exact: bool = False
) -> Differentiated:
    """The same from ``bin`` on, for records whose number is known. Arguments as in ``differentiate``."""
    records = on_device(records)
    while True:
        result, counts = _from_records(records, cameras, settings, loss, exact)
        state = counts.read()
        pair_capacity.learn(records.table.device, state[PAIRS])
        if not state[HALTED]:
            return _trimmed(result, state)
        records.state[HALTED] = 0


def _from_records(
    records: DeviceRecords, cameras: Cameras, settings: RenderSettings, loss: Loss, exact: bool
) -> tuple[Differentiated, Counts]:
    """What follows ``project``, in buffers as long as they are, and the counts that are on their way."""
    device = records.table.device
    tiles = bin_ahead(records, cameras, pair_capacity(device))
    counts = Counts.of_step(device)
    counts.fetch(records.state)
    if isinstance(loss, PhotometricLoss) and fused_raster.chosen(device, cameras, settings, loss, exact):
        image, losses, rows = fused_raster.rasterize_photometric(records, tiles, cameras, settings, loss, exact=exact)
    else:
        image = rasterize(records, tiles, cameras, settings)
        losses, gradients = loss(image)
        rows = rasterize_backward(records, tiles, cameras, settings, image, gradients, exact=exact)
    return Differentiated(records, tiles, image, losses, rows), counts


def _trimmed(result: Differentiated, state: list[int]) -> Differentiated:
    """The result with records, pairs and rows as many as there are."""
    tiles = replace(result.tiles, records=result.tiles.records[: state[PAIRS]])
    records, rows = result.records.first(state[RECORDS]), result.rows[: state[RECORDS]]
    return replace(result, records=records, tiles=tiles, rows=rows)


def project_for_owners(
    gaussians: Gaussians, cameras: Cameras, settings: RenderSettings, firsts: Sequence[int], announce: Announce
) -> tuple[DeviceRecords, list[int], list[int]]:
    """``project`` for the ranks that own the views; see ``ops.fused.project_for_owners``."""
    device, views = gaussians.device, torch.tensor(firsts)
    while True:
        records_fit = min(len(cameras) * len(gaussians), record_capacity(device))
        records = project_ahead(gaussians, cameras, settings, records_fit)
        blocks_per_view = max(1, -(-len(gaussians) // THREADS))
        starts = find_starts(records, blocks_per_view, len(cameras))[::blocks_per_view]
        counts = starts[views.to(device, non_blocking=True)].diff()
        halted, needed = records.state[HALTED] > 0, records.state[RECORDS]
        outgoing, incoming = announce(torch.where(halted, -needed, counts))
        record_capacity.learn(device, -outgoing[0] if outgoing[0] < 0 else sum(outgoing))
        if min(*outgoing, *incoming) >= 0:
            return records.first(sum(outgoing)), outgoing, incoming


def capacities(device: torch.device) -> tuple[int, int]:
    """Room for records (if there may be as many) and for pairs that ``differentiate`` would make now."""
    return record_capacity(device), pair_capacity(device)


def fitted(state: list[int], device: torch.device) -> bool:
    """Whether a step with these counts took place; capacities learn from them."""
    record_capacity.learn(device, state[RECORDS])
    pair_capacity.learn(device, state[PAIRS])
    return not state[HALTED]
