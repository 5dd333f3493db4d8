"""Which rank owns a Gaussian: the cells of a KD tree that tile all space, one for each rank, of equal load.

Cells follow from all Gaussians of the model together and from nothing else: not from the ranks on which they are now,
nor from the order of rows. Sums are of integers, and a split is found digit by digit in histograms that ranks add up,
so that no rank ever sees the others' Gaussians.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.parallel.ranks import ALONE, Ranks

DIGIT = 11
"""Bits of a key that one histogram resolves."""

COORDINATE_BITS, ID_BITS = 32, 63

EXTENT = (0.05, 0.95)
"""A cell is split across its longest side, measured between these quantiles of its load: a few far Gaussians are no
reason to cut."""


@dataclass(frozen=True)
class Split:
    """Divides the cell of ranks ``first`` to ``last`` - 1 between those below ``middle`` and the others.

    Below lies a Gaussian whose coordinate is less than ``value``, or equal with an id less than ``tie``; above lie all
    others, those without a number for a coordinate among them.
    """

    first: int
    middle: int
    last: int
    axis: int
    value: float  # world units
    tie: int

    def below(self, means: Tensor, ids: Tensor) -> Tensor:
        """[N] bool: which Gaussians lie below."""
        coordinate = means[:, self.axis]
        return (coordinate < self.value) | ((coordinate == self.value) & (ids < self.tie))


@dataclass(frozen=True)
class Cells:
    """Cells of ranks 0 to ``count`` - 1; outer ones are unbounded."""

    count: int
    splits: tuple[Split, ...]  # those of a cell before those of its parts

    def owners(self, means: Tensor, ids: Tensor) -> Tensor:
        """[N] int64, the rank that owns each Gaussian of mean [N, 3] (world units) and id [N]."""
        owners = torch.zeros_like(ids)
        for split in self.splits:
            owners[(owners == split.first) & ~split.below(means, ids)] = split.middle
        return owners


def divide(count: int, means: Tensor, ids: Tensor, loads: Tensor, ranks: Ranks) -> Cells:
    """Cells for ``count`` ranks, with loads in proportion to the ranks of both sides of every split.

    Args:
        count: any number of ranks, not only that of the ranks that divide.
        means, ids, loads: [n, 3] float32, [n] int64, [n] int64 >= 0 of the Gaussians that this rank holds. The ranks
            together hold each Gaussian once.
        ranks: those that hold the Gaussians. All get the same cells.
    """
    return Cells(count, tuple(_splits(0, count, means.detach(), ids, loads, ranks)))


def _splits(first: int, last: int, means: Tensor, ids: Tensor, loads: Tensor, ranks: Ranks) -> Iterator[Split]:
    if last - first == 1:
        return
    middle = (first + last) // 2
    keys = _order_keys(means)
    total = int(ranks.sum(loads.sum()))
    axis = max(range(3), key=lambda axis: _extent(keys[:, axis], loads, total, ranks))
    coordinate = keys[:, axis]
    share = total * (middle - first) // (last - first)
    key, below = _select(coordinate, loads, share, COORDINATE_BITS, ranks)
    at = coordinate == key
    tie, _ = _select(ids[at], loads[at], share - below, ID_BITS, ranks)
    split = Split(first, middle, last, axis, _coordinate(key), tie)
    yield split

    lower = split.below(means, ids)
    yield from _splits(first, middle, means[lower], ids[lower], loads[lower], ranks)
    yield from _splits(middle, last, means[~lower], ids[~lower], loads[~lower], ranks)


def _extent(keys: Tensor, loads: Tensor, total: int, ranks: Ranks) -> float:
    low, high = (_select(keys, loads, int(total * part), COORDINATE_BITS, ranks)[0] for part in EXTENT)
    return _coordinate(high) - _coordinate(low)


def _select(keys: Tensor, loads: Tensor, share: int, bits: int, ranks: Ranks) -> tuple[int, int]:
    """The largest key for which all lower ones together do not exceed a share of the load, and their load.

    Args:
        keys: [n] int64 in [0, 2^bits).
    """
    key = below = 0
    for shift in range(-(-bits // DIGIT) * DIGIT - DIGIT, -1, -DIGIT):
        inside = keys >> min(shift + DIGIT, 63) == key
        histogram = torch.zeros(1 << DIGIT, dtype=torch.int64, device=keys.device)
        histogram.index_add_(0, keys[inside] >> shift & (1 << DIGIT) - 1, loads[inside])
        before = ranks.sum(histogram, kind="partition").cumsum(0).roll(1)
        before[0] = 0
        digit = int((before + below <= share).sum()) - 1
        key, below = key << DIGIT | digit, below + int(before[digit])
    return min(key, (1 << bits) - 1), below


def _order_keys(means: Tensor) -> Tensor:
    """Integers in [0, 2^32) in the order of the float32 coordinates; those that are not a number come last."""
    bits = (means.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0).view(torch.int32).long()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + (1 << 31)


def _coordinate(key: int) -> float:
    """The float32 of an order key; infinity for what lies beyond all."""
    bits = key - (1 << 31)
    if bits >= 0x7F800000:
        return torch.inf
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def own_part(means: Tensor, ids: Tensor, ranks: Ranks) -> Tensor:
    """[n] int64, rows of a rank where all ranks hold all Gaussians [N]: cells of equal numbers."""
    cells = divide(ranks.size, means, ids, torch.ones_like(ids), ALONE)
    return (cells.owners(means, ids) == ranks.rank).nonzero().squeeze(1)


def move(store: GaussianStore, owners: Tensor, ranks: Ranks) -> None:
    """Sends every Gaussian with all of its rows to its owner [N]; rows are then in the order of ids."""
    away = [(owners == rank).nonzero().squeeze(1) for rank in range(ranks.size)]
    store.settle()
    tables = store.tables()
    received = {
        name: torch.cat(ranks.exchange([table[rows] for rows in away], kind="partition"))
        for name, table in tables.items()
    }
    store.replace(received)
