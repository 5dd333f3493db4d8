"""Packing views into rounds so that they share few ranks, and giving them owners: pure functions.

To pack an epoch is to colour a conflict graph: views that have a rank in common cannot share a round. Views that occupy
the same ranks are alike, so what is packed are buckets of them, first-fit by falling number of ranks, ties at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

PACKINGS = 8
"""Packings tried at most, until one reaches the lower bound. ``benchmarks/rounds.py`` says what one alone would do."""

CLIQUES = 64
"""Cliques tried for the lower bound, begun at the largest buckets."""


def permutation(seed: int, number: int, count: int, stream: int = 0) -> np.ndarray:
    """[count] int64, a uniform permutation drawn from (seed, number, stream) alone.

    Sorts random 64-bit words of the counter-based Philox generator (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", 2011) keyed by (seed, number). numpy promises that raw words never change between its releases,
    which it does not promise of `permutation`: a run may be resumed years later.
    """
    key = np.array([seed % 2**64, number], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=np.array([0, 0, 0, stream], dtype=np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")


def pack(occupied: Sequence[int], ranks: int, views_per_round: int, seed: int) -> list[list[int]]:
    """Rounds that show every view once, as few as can be found.

    The number of rounds depends on how often each bitmask occurs, not on the order of the views; that of equal views
    decides only which of them goes where.

    Args:
        occupied: bitmask of ranks for each view, not zero.
        views_per_round: a round has at most so many views, and of those that occupy one rank at most the rank's part,
            views_per_round / ranks rounded up.
        seed: of the order in which equally large buckets are packed.

    Returns:
        Rounds of positions in ``occupied``.
    """
    counts = Counter(sorted(occupied))  # in one order, whichever the views are in
    bound, best = lower_bound(occupied, ranks, views_per_round), None
    for attempt in range(PACKINGS):
        packing = _pack_buckets(counts, ranks, views_per_round, permutation(seed, attempt, len(counts), stream=2))
        if best is None or len(packing) < len(best):
            best = packing
        if len(best) <= bound:
            break
    assert best is not None
    members: dict[int, list[int]] = {mask: [] for mask in counts}
    for position, mask in enumerate(occupied):
        members[mask].append(position)
    following = {mask: iter(positions) for mask, positions in members.items()}
    return [[next(following[mask]) for mask in masks] for masks in best]


def lower_bound(occupied: Sequence[int], ranks: int, views_per_round: int) -> int:
    """Rounds that no packing can go below.

    The largest of: what the size of rounds allows; what the most occupied rank needs; and, where a rank has room for
    one view, the views of a clique in which any two conflict.
    """
    counts = Counter(sorted(occupied))
    room = -(-views_per_round // ranks)
    number, bits = _table(counts, ranks)
    bound = max(-(-len(occupied) // views_per_round), -(-int((number @ bits).max(initial=0)) // room))
    if room > 1:
        return bound
    conflict = bits.astype(np.float32) @ bits.T.astype(np.float32) > 0
    for start in np.argsort(-number, kind="stable")[:CLIQUES]:
        size, candidates, member = 0, conflict[start].copy(), int(start)
        while True:
            size += int(number[member])
            candidates &= conflict[member]
            candidates[member] = False
            if not candidates.any():
                break
            member = int(np.where(candidates, number, 0).argmax())
        bound = max(bound, size)
    return bound


def _pack_buckets(counts: Counter[int], ranks: int, views_per_round: int, ties: np.ndarray) -> list[list[int]]:
    """Rounds of bitmasks, each as often as it is counted."""
    masks, (number, bits) = list(counts), _table(counts, ranks)
    rounds: list[list[int]] = [[] for _ in range(int(number.sum()))]
    room = np.full((len(rounds), ranks), -(-views_per_round // ranks))  # of each rank in each round
    places = np.full(len(rounds), views_per_round)
    for bucket in np.lexsort((ties, -bits.sum(axis=1))):
        inside = bits[bucket].nonzero()[0]
        fits = np.minimum(room[:, inside].min(axis=1), places)
        taken = np.diff(np.minimum(fits.cumsum(), number[bucket]), prepend=0)
        room[:, inside] -= taken[:, None]
        places -= taken
        for index in taken.nonzero()[0]:
            rounds[index] += [masks[bucket]] * int(taken[index])
    return [members for members in rounds if members]


def _table(counts: Counter[int], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """How many views each bucket has, [B] int64, and which ranks they occupy, [B, ranks] int64 of 0 and 1."""
    assert all(0 < mask < 1 << ranks for mask in counts), "a view occupies some of the ranks"
    bits = np.array([[mask >> rank & 1 for rank in range(ranks)] for mask in counts], dtype=np.int64)
    return np.array(list(counts.values()), dtype=np.int64), bits.reshape(-1, ranks)


def assign_owners(footprints: np.ndarray) -> list[int]:
    """The rank that owns each view: where its footprint is largest, as far as every rank has its share of views.

    Args:
        footprints: [V, K], how much of a view each rank sees, in any unit.

    Returns:
        Owners of the V views: each rank has V / K of them, rounded up or down.
    """
    views, ranks = footprints.shape
    share = footprints / np.maximum(footprints.sum(axis=1, keepdims=True), 1)
    counts, owners = [0] * ranks, [-1] * views
    least, more = divmod(views, ranks)  # so many for each rank, and so many ranks with one more
    for pair in np.argsort(-share, axis=None, kind="stable"):
        view, rank = divmod(int(pair), ranks)
        if owners[view] < 0 and (counts[rank] < least or (counts[rank] == least and more)):
            more -= counts[rank] == least
            owners[view] = rank
            counts[rank] += 1
    return owners
