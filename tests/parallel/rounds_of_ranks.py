"""A round of a random scene, on one rank or on several, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.ops.layout import (
    ABSGRAD,
    ROW_WIDTH,
    Cameras,
    Gaussians,
    Image,
    ImageGradients,
    Observations,
    RenderSettings,
)
from bytesplat_ns.ops.reference.observe import along_x
from bytesplat_ns.parallel.exchange import Encoding, Exchange, Precision
from bytesplat_ns.parallel.ranks import Ranks

SIZES = ((61, 47), (40, 24), (17, 33), (64, 64), (30, 50))
"""Width and height of the views."""

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    name: str
    views: tuple[int, ...]  # how many each rank owns, beginning with rank 0; their sum is that of all views
    gaussians: int = 700
    shards: str = "modulo"  # or "first" (all on rank 0), "last"
    looking: str = "at"  # the views: or "away" (no records), "first_away" (a view that no rank sees)
    masked: bool = False  # all pixels: every gradient is zero


def scene(case: Case, views: int) -> tuple[Gaussians, Cameras, Tensor, Tensor | None]:
    """Gaussians with ascending ids, cameras around them, photos [V, H, W, 3] and perhaps a mask."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    count = case.gaussians
    gaussians = Gaussians(
        means=normal(count, 3) * 0.8,
        quats=normal(count, 4),
        scales=normal(count, 3) * 0.5 - 2.2,
        opacities=normal(count, 1) * 1.5,
        features_dc=normal(count, 3),
        features_rest=normal(count, 15, 3) * 0.2,
        ids=torch.arange(count) * 3 + 2**35,
    )
    gaussians.means[: count // 10] = gaussians.means[count // 2 : count // 2 + count // 10]  # equal depths
    sizes = SIZES[:views]
    viewmats = torch.eye(4).repeat(views, 1, 1)
    for view in range(views):
        angle = torch.tensor(0.9 * view)
        viewmats[view, 0, [0, 2]] = torch.stack([angle.cos(), angle.sin()])
        viewmats[view, 2, [0, 2]] = torch.stack([-angle.sin(), angle.cos()])
        away = case.looking == "away" or (case.looking == "first_away" and view == 0)
        viewmats[view, 2, 3] = -40.0 if away else 4.0
    intrinsics = torch.tensor([[0.9 * w, 0.9 * w, w / 2, h / 2] for w, h in sizes])
    width, height = (max(side) for side in zip(*sizes, strict=True))
    cameras = Cameras(viewmats, intrinsics, torch.tensor(sizes, dtype=torch.int32), width, height)
    target = torch.rand(views, height, width, 3, generator=generator)
    mask = torch.zeros(views, height, width, dtype=torch.uint8) if case.masked else None
    return gaussians, cameras, target, mask


def part_of(cameras: Cameras, first: int, last: int) -> Cameras:
    """Views ``first`` to ``last`` alone."""
    sizes = cameras.sizes[first:last]
    width, height = sizes.amax(0).tolist() if first < last else (0, 0)
    return Cameras(cameras.viewmats[first:last], cameras.intrinsics[first:last], sizes, width, height)


def moved(value: T, device: torch.device) -> T:
    """A dataclass with its tensors on a device."""
    tensors = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: t.to(device) for name, t in tensors.items() if isinstance(t, Tensor)})


def run_round(
    ranks: Ranks, case: Case, encoding: Encoding, statistics: bool, precision: Precision = "float32"
) -> dict[str, Any]:
    """Losses, images, rows by (view, id), gradients by id; of what this rank has. Computed on ``ranks.device``."""
    views = sum(case.views)
    gaussians, cameras, target, mask = scene(case, views)
    gaussians, cameras, target = moved(gaussians, ranks.device), moved(cameras, ranks.device), target.to(ranks.device)
    mask = None if mask is None else mask.to(ranks.device)
    owners = [rank for rank, count in enumerate(case.views) for _ in range(count)]
    if ranks.size == 1:
        owners = [0] * views
    mine = {"modulo": gaussians.ids // 3 % ranks.size, "first": 0, "last": ranks.size - 1}[case.shards]
    mine = (torch.zeros_like(gaussians.ids) + mine) == ranks.rank
    shard = Gaussians(**{name: getattr(gaussians, name)[mine] for name in (*Gaussians.PARAMETERS, "ids")})
    first = sum(owner < ranks.rank for owner in owners)
    last = first + owners.count(ranks.rank)
    own = part_of(cameras, first, last)
    settings = RenderSettings(statistics=statistics)

    def loss(image: Image) -> tuple[Tensor, ImageGradients]:
        photo, kept = target[first:last, : own.height, : own.width], None
        if mask is not None:
            kept = mask[first:last, : own.height, : own.width].contiguous()
        background = torch.full((last - first, 3), 0.3, device=ranks.device)
        return ops.loss(image, photo.contiguous(), background, own, mask=kept)

    exchange = Exchange(ranks, encoding, precision)
    ranks.sent.clear()
    ranks.rows = ranks.zero_rows = 0
    there = exchange.differentiate(shard, cameras, owners, own, settings, loss, absgrad=True)
    if ranks.size == 1 and precision == "bfloat16":  # which does nothing there
        if statistics:
            sizes = cameras.sizes[there.records.view.long()]
            there.rows[:, ABSGRAD.start] = along_x(there.rows[:, ABSGRAD], sizes)
            there.rows[:, ABSGRAD.start + 1] = 0
        there.rows = there.rows.bfloat16().float()
    gradients = ops.project_backward(shard, cameras, settings, there.records, there.rows)
    poses = ranks.sum(gradients.viewmats)
    observed = Observations(*(torch.zeros(len(shard), dtype=t) for t in (torch.int64, torch.int32, torch.float32)))
    observed = moved(observed, ranks.device)
    if statistics:
        ops.observe(there.records, there.rows, cameras, observed, absgrad=True)
    rows = there.rows[:, :ROW_WIDTH]
    return {
        "losses": there.losses.cpu(),
        "images": [
            (there.image.rgb[v, :h, :w].cpu(), there.image.transmittance[v, :h, :w].cpu())
            for v, (w, h) in enumerate(cameras.sizes[first:last].tolist())
        ],
        "rows": (there.records.view.cpu(), there.records.ids.cpu(), rows.cpu()),
        "gradients": (
            shard.ids.cpu(),
            {name: table.cpu() for name, table in (gradients.parameters() | vars(observed)).items()},
        ),
        "poses": poses.cpu(),
        "sent": dict(ranks.sent),
        "zero": (ranks.rows, ranks.zero_rows),
    }


def collect(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What the ranks have together, in the order in which one rank has it."""
    view, ids, rows = (torch.cat(part) for part in zip(*(result["rows"] for result in results), strict=True))
    order = ids.argsort(stable=True)
    order = order[view[order].argsort(stable=True)]
    owned = torch.cat([result["gradients"][0] for result in results]).argsort()
    names = results[0]["gradients"][1]
    together = {name: torch.cat([result["gradients"][1][name] for result in results])[owned] for name in names}
    images = [part.flatten() for result in results for image in result["images"] for part in image]
    return together | {
        "view": view[order],
        "ids": ids[order],
        "rows": rows[order],
        "losses": torch.cat([result["losses"] for result in results]),
        "images": torch.cat(images),
    }
