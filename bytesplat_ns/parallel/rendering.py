"""Looking at a model that no rank has as a whole: everybody sends the owner of a view the records that reach it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.ops import fused, wire
from bytesplat_ns.ops.layout import Cameras, Gaussians, Image, Records, RenderSettings
from bytesplat_ns.parallel.ranks import Ranks

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModel


@dataclass(frozen=True)
class Sight:
    """A turn in which every rank looks at views of its own, or at none."""

    records: Records  # of this rank's Gaussians, in the views of all ranks, in the order of the ranks
    seen: Records | None  # of the Gaussians of all ranks, in this rank's views; None if it has none
    outgoing: list[int]  # records for each rank
    incoming: list[int]  # records from each rank


@torch.no_grad()
def look_together(
    gaussians: Gaussians, own: Cameras | None, settings: RenderSettings, ranks: Ranks, kind: str = "evaluation"
) -> Sight:
    """Sends the records that reach a view to the rank that looks at it. All must call together.

    Args:
        gaussians: those of this rank.
        own: views that this rank wants to see; None if it only helps the others. Not all ranks may want none.
        kind: of the bytes that are sent.
    """
    if ranks.size == 1:
        records = ops.project(gaussians, own, settings)
        return Sight(records, records, [len(records)], [len(records)])
    wanted = ranks.share(None if own is None else _on_host(own))
    firsts = [0]
    for views in wanted:
        firsts.append(firsts[-1] + (0 if views is None else len(views)))
    cameras = _joined([views for views in wanted if views is not None], gaussians.device)
    records, outgoing, incoming = fused.project_for_owners(
        gaussians, cameras, settings, firsts, lambda counts: ranks.announce_rows(counts, kind)
    )
    received = ranks.exchange_rows(wire.pack(records), outgoing, incoming, kind)
    seen = None if own is None else wire.unpack(received, firsts[ranks.rank])
    return Sight(records, seen, outgoing, incoming)


def give_back(sight: Sight, values: Tensor, ranks: Ranks, kind: str = "evaluation") -> Tensor:
    """What each rank has found out about the records that it has seen, where these came from. All must call together.

    Args:
        values: [m, ...], a row for each record of ``sight.seen``; none of a rank without a view.

    Returns:
        [n, ...], a row for each record of ``sight.records``.
    """
    if ranks.size == 1:
        return values
    ranks.announce_rows(torch.tensor(sight.incoming, device=ranks.device), kind)
    return ranks.exchange_rows(values, sight.incoming, sight.outgoing, kind)


def render_together(gaussians: Gaussians, own: Cameras | None, settings: RenderSettings, ranks: Ranks) -> Image | None:
    """The image of this rank's views with the Gaussians of all ranks; arguments as in ``look_together``."""
    seen = look_together(gaussians, own, settings, ranks).seen
    if seen is None:
        return None
    with torch.no_grad():
        return ops.rasterize(seen, ops.bin(seen, own), own, settings)


@contextmanager
def rendering_together(model: ByteSplatModel, ranks: Ranks) -> Iterator[None]:
    """Within its block the model renders what all ranks have, together with them; with one rank it does so anyway."""
    if ranks.size == 1:
        yield
        return
    model.render_gaussians = partial(render_together, ranks=ranks)
    try:
        yield
    finally:
        del model.render_gaussians


def _on_host(cameras: Cameras) -> Cameras:
    tensors = (cameras.viewmats.cpu(), cameras.intrinsics.cpu(), cameras.sizes.cpu())
    return Cameras(*tensors, cameras.width, cameras.height)


def _joined(parts: list[Cameras], device: torch.device) -> Cameras:
    return Cameras(
        viewmats=torch.cat([part.viewmats for part in parts]).to(device),
        intrinsics=torch.cat([part.intrinsics for part in parts]).to(device),
        sizes=torch.cat([part.sizes for part in parts]).to(device),
        width=max(part.width for part in parts),
        height=max(part.height for part in parts),
    )
