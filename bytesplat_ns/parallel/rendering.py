"""Looking at a model that no rank has as a whole: everybody sends the owner of a view the records that reach it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from bytesplat_ns import ops
from bytesplat_ns.ops import fused, wire
from bytesplat_ns.ops.layout import Cameras, Gaussians, Image, RenderSettings
from bytesplat_ns.parallel.ranks import Ranks

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModel


@torch.no_grad()
def render_together(gaussians: Gaussians, own: Cameras | None, settings: RenderSettings, ranks: Ranks) -> Image | None:
    """The image of this rank's views with the Gaussians of all ranks. All must call together.

    Args:
        gaussians: those of this rank.
        own: views that this rank wants to see; None if it only helps the others. Not all ranks may want none.
    """
    wanted = ranks.share(None if own is None else _on_host(own))
    firsts = [0]
    for views in wanted:
        firsts.append(firsts[-1] + (0 if views is None else len(views)))
    cameras = _joined([views for views in wanted if views is not None], gaussians.device)
    records, outgoing, incoming = fused.project_for_owners(
        gaussians, cameras, settings, firsts, lambda counts: ranks.announce_rows(counts, "evaluation")
    )
    received = ranks.exchange_rows(wire.pack(records), outgoing, incoming, "evaluation")
    if own is None:
        return None
    records = wire.unpack(received, firsts[ranks.rank])
    return ops.rasterize(records, ops.bin(records, own), own, settings)


@contextmanager
def shown(model: ByteSplatModel, ranks: Ranks) -> Iterator[None]:
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
