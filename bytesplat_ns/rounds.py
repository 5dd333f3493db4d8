"""Which views make up the next optimizer step: a pure function of a seed, the images seen, and what views occupy.

Nothing is drawn in the course of a run: a resumed run, or another rank, that knows the plan and the position has the
same rounds without being told. An epoch shows every view exactly once; rounds are short rather than padded with
repeats, so no view appears twice in a round.

A plan for one rank takes the next views of the epoch's order. In a plan for several every view occupies some of them
(a bitmask), and views share a round so that no rank is occupied by more of them than its part of a full round: with one
view for each rank, views that have no rank in common (ByteSplat, arXiv 2610.02851, "conflict-free consolidation").
``packing.py`` packs. How many ranks there are is another matter (``parallel/sharing.py``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from torch import Tensor

from bytesplat_ns.packing import pack, permutation


@dataclass
class View:
    """One training photo with its pinhole camera, at the resolution of the round."""

    index: int  # of the training image
    owner: int  # rank that holds the photo and computes its loss
    camera_to_world: Tensor  # [3, 4] float32 on the CPU, world units, OpenGL axes (x right, y up, z backward)
    fx: float  # pixels
    fy: float  # pixels
    cx: float  # pixels, the centre of the first pixel is at 0.5
    cy: float  # pixels
    width: int  # pixels
    height: int  # pixels
    image: Tensor | None  # [H, W, 3 | 4] uint8 on its owner's device, straight alpha; None on other ranks
    mask: Tensor | None  # [H, W] uint8 on its owner's device, nonzero = keep


@dataclass
class Round:
    """The views of one optimizer step."""

    views: list[View]  # in the order of their owners
    position: int  # images seen before this round; the next round starts at position + len(views)

    @property
    def owners(self) -> list[int]:
        """Rank of each view, ascending."""
        return [view.owner for view in self.views]

    def owned_by(self, rank: int) -> slice:
        """Which of ``views`` a rank owns; it may own none."""
        return slice(bisect_left(self.owners, rank), bisect_right(self.owners, rank))


@lru_cache(maxsize=4)  # sorting a large capture anew in each round would show
def epoch_order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """The order in which an epoch shows `count` views: a uniform permutation drawn from (seed, epoch) alone."""
    return tuple(permutation(seed, epoch, count).tolist())


@dataclass(frozen=True)
class Plan:
    """The rounds of a run from some position on: a pure function of its fields.

    An epoch is ``count`` images, whatever the plan, and begins at a multiple of them. The first epoch of a plan that
    begins within one has the views that the former plan has left.
    """

    seed: int
    count: int  # views of an epoch
    views_per_round: int  # at most
    ranks: int = 1  # that it is for
    occupied: tuple[int, ...] | None = None  # [count] bitmask of ranks, not zero, for each view; None with one rank
    begin: int = 0  # images seen before its first round
    left: tuple[int, ...] | None = None  # what the epoch of ``begin`` has left, in order; None: what the order says
    _epochs: dict[int, _Epoch] = field(default_factory=dict, init=False, repr=False, compare=False)

    def round_at(self, position: int) -> tuple[int, ...]:
        """Indices of the views that the round at ``position`` (images seen before it) shows: distinct, at most
        ``views_per_round``, fewer at the end of an epoch and where the plan says so."""
        epoch, seen = self._epoch_at(position)
        return epoch.order[seen : self._end_of_round(epoch, seen)]

    def rounds_between(self, position: int, total: int) -> int:
        """Rounds that take a run from ``position`` to at least ``total`` images seen."""
        if position >= total:
            return 0
        epoch, seen = self._epoch_at(position)
        this_epoch = min(total - position, len(epoch.order) - seen)
        epochs, rest = divmod(total - position - this_epoch, self.count)
        rounds = self._rounds_within(position, this_epoch)
        if epochs:  # epochs have one number of rounds, since it depends only on what views occupy
            rounds += epochs * self._rounds_within(position + this_epoch, self.count)
        return rounds + (self._rounds_within(total - rest, rest) if rest else 0)

    def left_at(self, position: int) -> tuple[int, ...] | None:
        """Views that the epoch has left at a position, in order; None where one begins."""
        if position % self.count == 0:
            return None
        epoch, seen = self._epoch_at(position)
        return epoch.order[seen:]

    def followed(self, position: int, **changes: Any) -> Plan:
        """The plan that takes over at ``position``, with other ranks, occupation or size of rounds."""
        return replace(self, **changes, begin=position, left=self.left_at(position))

    def _rounds_within(self, position: int, images: int) -> int:
        """Rounds that show so many images of one epoch from a position on."""
        if self.ranks == 1:
            return -(-images // self.views_per_round)
        epoch, seen = self._epoch_at(position)
        return bisect_left(epoch.ends, seen + images) - bisect_right(epoch.ends, seen) + 1

    def _end_of_round(self, epoch: _Epoch, seen: int) -> int:
        if self.ranks == 1:
            return seen + self.views_per_round
        return epoch.ends[bisect_right(epoch.ends, seen)]

    def _epoch_at(self, position: int) -> tuple[_Epoch, int]:
        """The epoch that holds a position, and how many of its views were shown by then."""
        number, seen = divmod(position, self.count)
        first, shown = divmod(self.begin, self.count)
        partial = self.left is not None and number == first
        if number not in self._epochs:
            if len(self._epochs) > 4:
                self._epochs.clear()
            views = self.left if partial else epoch_order(self.seed, number, self.count)
            self._epochs[number] = self._packed(number, views)
        return self._epochs[number], seen - shown if partial else seen

    def _packed(self, number: int, views: tuple[int, ...]) -> _Epoch:
        """The epoch that shows these views, given in a random order."""
        if self.ranks == 1:
            return _Epoch(views, ())
        rounds = pack([self.occupied[view] for view in views], self.ranks, self.views_per_round, self.seed)
        shuffled = [rounds[i] for i in permutation(self.seed, number, len(rounds), stream=1)]
        ends = tuple(accumulate(len(members) for members in shuffled))
        return _Epoch(tuple(views[i] for members in shuffled for i in members), ends)


@dataclass(frozen=True)
class _Epoch:
    """The order in which an epoch shows its views; after how many of them each round ends, if they are packed."""

    order: tuple[int, ...]
    ends: tuple[int, ...]
