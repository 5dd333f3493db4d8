"""What pruning asks about tile lists: how far down something is seen, and which records make tiles heavy."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import TILE, Cameras, Records, RenderSettings, TileLists
from .raster import _blend, _occupied, _power
from .stage import stage


@stage
def effective_lengths(records: Records, tiles: TileLists, cameras: Cameras, settings: RenderSettings) -> Tensor:
    """How far down each tile's list something is still seen.

    Returns:
        [tiles] int32: entries up to the last one that contributes to a pixel, itself included. What comes behind is
        hidden at every pixel, or reaches none, and is never needed again once the image is made.
    """
    lengths = torch.zeros(len(tiles.offsets) - 1, dtype=torch.int32, device=tiles.offsets.device)
    for listed, (view, y, x), centres in _occupied(tiles, cameras):
        table = records.table[listed]
        weight, _ = _blend(_power(table, centres), table, settings.stop, None)
        seen = (weight > 0).any(dim=1).nonzero()
        if len(seen):
            tile = (view * cameras.tiles_y + y.start // TILE) * cameras.tiles_x + x.start // TILE
            lengths[tile] = seen[-1, 0] + 1
    return lengths


@stage
def tile_costs(records: Records, tiles: TileLists, lengths: Tensor, budget: int) -> Tensor:
    """In how many tiles each record is listed, is too far down the list, and adds to a list that is too long.

    Args:
        lengths: [tiles] effective lengths; a tile is over budget if its own is larger than ``budget``.
        budget: entries of a list that are within it.

    Returns:
        [M, 3] int32: tiles that list the record; of these, tiles where ``budget`` or more entries come before it; and
        tiles over budget.
    """
    sizes = tiles.offsets.diff()
    tile = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    rank = torch.arange(len(tile), device=sizes.device) - tiles.offsets[tile]
    counted = torch.stack([torch.ones_like(rank), rank >= budget, lengths[tile] > budget], dim=1).int()
    costs = torch.zeros(len(records), 3, dtype=torch.int32, device=sizes.device)
    return costs.index_add_(0, tiles.records.long(), counted)
