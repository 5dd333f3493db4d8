"""Tile lists: which records reach which tile, near to far."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import ALPHA_MIN, CONIC, DEPTH, MEAN2D, OPACITY, TILE, Cameras, Records, TileLists
from .stage import stage


@stage
def bin(records: Records, cameras: Cameras) -> TileLists:
    """Lists each record in the tiles it reaches, ordered by depth, equal depths by global id.

    A record reaches a tile when its ellipse {alpha >= 1/255} meets the rectangle spanned by the tile's pixel
    centres (those inside the view).
    """
    # 1. Candidates: the tiles of the ellipse's bounding box, record by record, with a pixel to spare for rounding.
    mean, opacity = records.table[:, MEAN2D], records.table[:, OPACITY]
    view = records.view.long()
    a, b, c = records.table[:, CONIC].double().unbind(-1)  # a c - b b of needles has few digits
    covariance = torch.stack([c, a], -1) / (a * c - b * b)[:, None]
    reach = 1 + (2 * torch.log(opacity / ALPHA_MIN)[:, None] * covariance).sqrt()  # [M, 2]
    last_tile = (cameras.sizes[view] - 1) // TILE
    low = ((mean - reach) / TILE).floor().clamp(min=0)
    high = torch.minimum(((mean + reach) / TILE).floor(), last_tile)
    columns, rows = (high - low + 1).clamp(min=0).long().unbind(-1)
    low = low.long()
    record = torch.arange(len(records), device=mean.device).repeat_interleave(columns * rows)
    first = (columns * rows).cumsum(0) - columns * rows
    number = torch.arange(len(record), device=mean.device) - first[record]
    tile_x = low[record, 0] + number % columns[record]
    tile_y = low[record, 1] + number // columns[record]

    # 2. Of those, the tiles that the ellipse really meets.
    size = cameras.sizes[view[record]]
    tile = torch.stack([tile_x, tile_y], -1)
    first_pixel = tile * TILE + 0.5 - mean[record]
    last_pixel = torch.minimum((tile + 1) * TILE, size) - 0.5 - mean[record]
    least = _least_power(records.table[record, CONIC], first_pixel, last_pixel)
    reached = least <= torch.log(opacity[record] / ALPHA_MIN)
    record, tile_x, tile_y = record[reached], tile_x[reached], tile_y[reached]

    # 3. Sorted by (tile, depth, id): three stable sorts, the least significant key first.
    tile = (view[record] * cameras.tiles_y + tile_y) * cameras.tiles_x + tile_x
    order = records.ids[record].argsort(stable=True)
    order = order[records.table[record[order], DEPTH].argsort(stable=True)]
    order = order[tile[order].argsort(stable=True)]

    tile_count = len(cameras) * cameras.tiles_y * cameras.tiles_x
    return TileLists(
        offsets=_offsets(tile, tile_count),
        records=record[order].int(),
        pair=order,
        pair_offsets=_offsets(record, len(records)),
    )


def _least_power(conic: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Least sigma over the rectangles from first to last, each [P, 2] pixels from the mean.

    A convex quadratic that is least at the mean is least over a rectangle on one of the sides that face the
    mean: the one in x or the one in y, there at the clamped minimum along the side. With the mean inside,
    both give zero.
    """
    a, b, c = conic.unbind(-1)
    (x0, y0), (x1, y1) = first.unbind(-1), last.unbind(-1)
    zero = torch.zeros_like(a)
    near_x, near_y = zero.clamp(x0, x1), zero.clamp(y0, y1)
    best_x, best_y = (-b * near_y / a).clamp(x0, x1), (-b * near_x / c).clamp(y0, y1)

    def sigma(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (a * x * x + c * y * y) + b * x * y

    return torch.minimum(sigma(near_x, best_y), sigma(best_x, near_y))


def _offsets(keys: Tensor, count: int) -> Tensor:
    """[count + 1] int64: the entries with key k, once sorted, lie between offsets[k] and offsets[k + 1]."""
    offsets = torch.zeros(count + 1, dtype=torch.int64, device=keys.device)
    offsets[1:] = torch.bincount(keys, minlength=count).cumsum(0)
    return offsets
