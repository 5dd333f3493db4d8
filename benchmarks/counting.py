"""Bytes that multiprocessors should ask of L2 for image, loss and gradients of a view, from a scene's own counts.

Fixed before anything was measured, so that a measurement can disagree. L2 moves sectors of 32 bytes; a store or an
addition counts those that it touches. What is assumed of the caches of the multiprocessors:

- three kernels: a part (8 x 8 pixels) is a block, and neighbours run elsewhere, so each part reads its list from L2;
- one kernel: the four parts of a tile read its list together, so all but the one that goes furthest find it in L1;
  what the backward pass reads again is read at four times, by each part on its own;
- within a load or store of a warp, and among the loads of one record, nothing is read twice; from one channel of the
  loss to the next everything is, since four blocks' images are more than L1 has left.

Left out: what waiting blocks read while they wait, ends of lists, sums and flags.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from floors import LANES, Walk
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, TileLists

SECTOR = 32
RECORD = 2 * SECTOR  # 40 bytes that begin at a multiple of 16
ROW = 3 * SECTOR  # added to: 64 bytes, and one of them again for the largest contribution
WRITTEN_ROW = 64  # set to zero
ALIGNMENT = 4  # bytes: runs of floats begin at a multiple
BLOCK, MARGIN, TILE = 32, 5, 16  # of the loss; of a window; of the one kernel


def touched(size: int, alignment: int = ALIGNMENT) -> float:
    """Bytes of the sectors that a run of bytes touches on average, beginning at any multiple of the alignment."""
    return size + SECTOR - alignment


@dataclass(frozen=True)
class Counted:
    """Bytes by what they are for."""

    lists_forward: float
    lists_backward: float
    rows: float
    pixels: float

    @property
    def total(self) -> float:
        return self.lists_forward + self.lists_backward + self.rows + self.pixels

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


def three_kernels(walk: Walk, tiles: TileLists, used: Tensor, records: int, cameras: Cameras) -> Counted:
    """Of ``rasterize``, ``loss`` and ``rasterize_backward``.

    Args:
        used: [tiles, parts] records that the backward pass goes through.
        records: rows of gradients.
    """
    window = BLOCK + 2 * MARGIN
    halo = 3 * window * (touched(12 * window) + touched(4 * window) + touched(3 * window, 1)) / BLOCK**2
    derivatives = 9 * window * touched(4 * window) / BLOCK**2
    image, photo = 12 + 4, 3
    a_pixel = (3 * 12 + 4 + 4) + halo + 36 + derivatives + 3 * (image + photo) + (3 * 12 + 4) + 2 * image
    pixels = cameras.width * cameras.height * len(cameras)
    return Counted(
        lists_forward=_lists(walk.batches + 1, walk.batches + 1, tiles),
        lists_backward=_lists(walk.batches, walk.batches + 1, tiles),
        rows=_rows(used, records),
        pixels=a_pixel * pixels,
    )


def one_kernel(walk: Walk, tiles: TileLists, reads: Tensor, records: int, cameras: Cameras) -> Counted:
    """Of ``rasterize_photometric``.

    Args:
        reads: [tiles, parts, 3] as the kernel counts them: queued, kept, used.
    """
    _, kept, used = reads.double().unbind(-1)
    # Records lie about evenly along a list: the share of them that is read again is that of the batches.
    again = walk.batches * ((used - kept) / used.clamp(min=1)).clamp(min=0)
    plane = touched(32) / 8  # a float of 8 neighbours: they do not begin where a sector does
    lines = 15 * (TILE + 2 * MARGIN) * touched(28 * 4, 16) / TILE**2
    a_pixel = (3 * 12 + 4) + touched(24, 8) / 8 + 6 * plane + lines + 9 * plane + 3 * plane
    furthest = walk.batches.amax(1, keepdim=True) + 1
    return Counted(
        lists_forward=_lists(furthest, furthest, tiles),
        lists_backward=_lists(again, again, tiles),
        rows=_rows(used, records),
        pixels=a_pixel * cameras.width * cameras.height * len(cameras),
    )


def _lists(batches: Tensor, of_indices: Tensor, tiles: TileLists) -> float:
    """Bytes of reading so many batches [tiles, parts] of records, and of their places in the table."""
    lengths = tiles.offsets.diff()[:, None].double()
    entries, places = (torch.minimum(LANES * count.double(), lengths) for count in (batches, of_indices))
    runs = (places / LANES).ceil()
    return float(RECORD * entries.sum() + (4 * places + touched(0) * runs).sum())


def _rows(used: Tensor, records: int) -> float:
    return ROW * float(used.sum()) + WRITTEN_ROW * records
