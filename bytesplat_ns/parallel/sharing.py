"""Which views meet in a round, and who owns them: what several ranks agree on without a word.

Rounds are planned for as many ranks as they have views, whatever the number of those that train. So they, and the order
of the views in them, are the same on any number of ranks, and after a return on any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from bytesplat_ns.packing import assign_owners, lower_bound
from bytesplat_ns.rounds import Plan

Consolidation = Literal["auto", "on", "off"]

Footprints = Callable[[int], np.ndarray]
"""[V, K] how much each of K parts of the scene shows of itself in each training view; zero: nothing."""

CONSOLIDATION_COST = 1.1
"""Rounds of views that no rank sees two of may be so many times as many as rounds without that care."""


@dataclass(frozen=True)
class Sharing:
    """A plan of rounds, and for each training view who would own and see it if there were as many ranks as planned for.

    Each of these ranks has a part of the scene and owns as many views as the others, at most one of a round.
    """

    plan: Plan
    planned_owners: tuple[int, ...]  # of each view
    rank_sets: tuple[int, ...]  # bitmask of the planned ranks that contribute to each view, its owner among them

    @staticmethod
    def alone(plan: Plan) -> Sharing:
        """Views in their order."""
        return Sharing(plan, (0,) * plan.count, (1,) * plan.count)

    def state_dict(self) -> dict[str, Any]:
        plan = {f.name: getattr(self.plan, f.name) for f in fields(self.plan) if f.init}
        return {"plan": plan, "owners": self.planned_owners, "rank_sets": self.rank_sets}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Sharing:
        return Sharing(Plan(**state["plan"]), state["owners"], state["rank_sets"])

    def owners_among(self, ranks: int, footprints: Footprints) -> tuple[int, ...]:
        """The rank, of so many that there are, that owns each view: they ascend with the planned owners.

        A rank stands in for several planned ones; or several for one, of which each has what its part shows most of.
        """
        planned = self.plan.ranks
        if ranks <= planned:
            return tuple(owner * ranks // planned for owner in self.planned_owners)
        shown, planned_owners = footprints(ranks), np.array(self.planned_owners)
        owners = np.empty_like(planned_owners)
        for owner in range(planned):
            first, last = (ranks * end // planned for end in (owner, owner + 1))
            views = (planned_owners == owner).nonzero()[0]
            owners[views] = [first + further for further in assign_owners(shown[views, first:last])]
        return tuple(owners.tolist())

    def describe(self) -> str:
        """One line for the log on rounds of several views: what they are like, compared to what they could be."""
        views, ranks = self.plan.count, self.plan.ranks
        shown = sum(mask.bit_count() for mask in self.rank_sets) / views
        rounds = len(rounds_of_epoch(self.plan))
        apart = self.plan.occupied == self.rank_sets
        bound = lower_bound(self.rank_sets, ranks, self.plan.views_per_round)
        kept = "parts" if apart else "owners"
        return (
            f"A view shows {shown:.1f} of {ranks} parts of the scene on average. "
            f"Rounds of {views / rounds:.2f} views, of different {kept} (parts: at most {views / bound:.2f} views)."
        )


def share(
    plan: Plan,
    position: int,
    footprints: Footprints,
    views_per_round: int,
    consolidate: Consolidation,
    owners: Sequence[int] | None = None,
) -> Sharing:
    """The sharing that takes over from a plan at a position.

    Rounds of one view are in the plan's order. Rounds of several are packed (``packing.py``) by the parts that a view
    shows, or, without consolidation, by its owner alone. "auto" consolidates if that makes few rounds more.

    Args:
        owners: the planned ones that were given before.
    """
    ranks = min(views_per_round, plan.count)
    if ranks == 1:
        return Sharing.alone(plan.followed(position, views_per_round=views_per_round, ranks=1, occupied=None))
    shown = footprints(ranks)
    owners = tuple(assign_owners(shown) if owners is None else owners)
    bits = [1 << rank for rank in range(ranks)]
    rank_sets = tuple(
        sum(bit for bit, sees in zip(bits, row, strict=True) if sees) | bits[owner]
        for row, owner in zip((shown > 0).tolist(), owners, strict=True)
    )
    size = {"views_per_round": views_per_round, "ranks": ranks}
    apart = plan.followed(position, **size, occupied=rank_sets)
    loose = plan.followed(position, **size, occupied=tuple(bits[owner] for owner in owners))
    if consolidate == "auto":
        few = len(rounds_of_epoch(apart)) <= CONSOLIDATION_COST * len(rounds_of_epoch(loose))
        consolidate = "on" if few else "off"
    return Sharing(apart if consolidate == "on" else loose, owners, rank_sets)


def rounds_of_epoch(plan: Plan) -> list[tuple[int, ...]]:
    """The rounds of the first whole epoch of a plan."""
    position = -(-plan.begin // plan.count) * plan.count
    end, rounds = position + plan.count, []
    while position < end:
        rounds.append(plan.round_at(position))
        position += len(rounds[-1])
    return rounds
