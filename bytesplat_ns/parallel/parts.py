"""What views show of which part of the scene, whoever holds it: what rounds are planned by.

Parts are cells of equal load (``partition``), found anew from the Gaussians of all ranks together, not those that the
ranks have now. So any number of ranks finds the same, and plans the same rounds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, Gaussians, RenderSettings
from bytesplat_ns.parallel import visibility
from bytesplat_ns.parallel.balance import loads
from bytesplat_ns.parallel.partition import divide
from bytesplat_ns.parallel.ranks import ALONE, Ranks

SAMPLE = 1 << 20
"""Gaussians of all ranks that are enough to tell; of more, some are taken evenly from their ids."""


def footprints(
    count: int,
    gaussians: Gaussians,
    total: int,
    cameras: Cameras,
    probes: Cameras,
    settings: RenderSettings,
    ranks: Ranks,
) -> np.ndarray:
    """[V, count] int64, Gaussians of each of so many parts of the scene that each view may show. All call together.

    Args:
        gaussians, total: those of this rank, and the number of all.
        cameras, probes: all V views, and some by which load is measured.
    """
    own = _rows(gaussians, gaussians.ids % -(-total // SAMPLE) == 0)
    numbers = ranks.gather(torch.stack([own.ids, loads(own, probes, settings)], dim=1), "partition")
    values = ranks.gather(torch.cat([own.means, own.scales, own.opacities], dim=1), "partition")
    ids, order = numbers[:, 0].sort()
    means, scales, opacities = values[order].split([3, 3, 1], dim=1)
    unused = (means.new_zeros(len(ids), *columns) for columns in ((4,), (3,), (0, 3)))
    quats, dc, rest = unused
    sample = Gaussians(means, quats, scales, opacities, dc, rest, ids)
    part = divide(count, means, ids, numbers[order, 1], ALONE).owners(means, ids)
    seen = [
        visibility.footprints(visibility.blocks(_rows(sample, part == number)), cameras, settings)
        for number in range(count)
    ]
    return ranks.broadcast(torch.stack(seen, dim=1).cpu().numpy())  # the same everywhere, on unlike machines too


def _rows(gaussians: Gaussians, rows: Tensor) -> Gaussians:
    return Gaussians(**{name: table[rows] for name, table in vars(gaussians).items()})
