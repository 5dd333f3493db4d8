"""Keeping the ranks equally busy: what Gaussians cost, and moving them when one rank has too much to do."""

from __future__ import annotations

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.layout import Cameras, Gaussians, RenderSettings
from bytesplat_ns.parallel.partition import divide, move
from bytesplat_ns.parallel.ranks import Ranks


def loads(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> Tensor:
    """[N] int64, what each Gaussian costs: its records in these views, and one for its memory and its update."""
    load = torch.ones_like(gaussians.ids)
    for v in range(len(cameras)):
        records = ops.project(gaussians, cameras.view(v), settings)
        load.index_add_(0, records.gaussian.long(), torch.ones_like(records.ids))
    return load


def rebalance(
    store: GaussianStore, cameras: Cameras, settings: RenderSettings, ranks: Ranks, threshold: float
) -> float | None:
    """Moves Gaussians to cells of equal load if the busiest rank has more than ``threshold`` times the mean load.

    Returns:
        that rank's load before, in units of the mean, if they were moved.
    """
    load = loads(store.gaussians(), cameras, settings)
    total = ranks.gather(load.sum()[None], "partition").double()
    busiest = float(total.max() / total.mean())
    if not busiest > threshold:
        return None
    means = store.parameters["means"].detach()
    cells = divide(ranks.size, means, store.ids, load, ranks)
    move(store, cells.owners(means, store.ids), ranks)
    return busiest
