"""Which views make up the next optimizer step: a pure function of (seed, images seen so far).

No state is kept between rounds: a resumed run, or another rank, that knows the seed and the position derives the
same plan without being told. An epoch shows every view exactly once; its last round is short rather than padded with
repeats, so no view appears twice in a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor


@dataclass
class View:
    """One training photo with its pinhole camera, at the resolution of the round."""

    index: int  # of the training image
    owner: int  # rank that holds the photo and computes its loss
    ranks: int  # bitmask of the ranks that contribute to the view, the owner among them
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

    views: list[View]
    position: int  # images seen before this round; the next round starts at position + len(views)

    def owned_by(self, rank: int) -> list[int]:
        """Places in ``views`` of those that a rank owns; it may own none."""
        return [place for place, view in enumerate(self.views) if view.owner == rank]


@lru_cache(maxsize=4)  # sorting a large capture anew in each round would show
def epoch_order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """The order in which an epoch shows `count` views: a uniform permutation drawn from (seed, epoch) alone.

    Sorts random 64-bit words of the counter-based Philox generator (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", 2011) keyed by (seed, epoch). numpy promises that raw words never change between its releases,
    which it does not promise of `permutation`: a run may be resumed years later.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(count)
    return tuple(np.argsort(words, kind="stable").tolist())


def round_indices(seed: int, position: int, count: int, views_per_round: int) -> list[int]:
    """Indices of the views that the round at `position` (images seen before it) shows, out of `count` views.

    Has `views_per_round` distinct views, or fewer at the end of an epoch.
    """
    epoch, seen = divmod(position, count)
    return list(epoch_order(seed, epoch, count)[seen : seen + views_per_round])


def rounds_between(position: int, total: int, count: int, views_per_round: int) -> int:
    """Rounds that take a run over ``count`` views from ``position`` to at least ``total`` images seen."""
    if position >= total:
        return 0
    this_epoch = min(total - position, count - position % count)
    epochs, rest = divmod(total - position - this_epoch, count)
    first, full, last = (-(-images // views_per_round) for images in (this_epoch, count, rest))
    return first + epochs * full + last
