"""Who owns which view, which ranks see it, and when it is shown: what several ranks agree on without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from bytesplat_ns.packing import assign_owners, lower_bound
from bytesplat_ns.rounds import Plan

Consolidation = Literal["auto", "on", "off"]

CONSOLIDATION_COST = 1.1
"""Rounds of views that no rank sees two of may be so many times as many as rounds without that care."""


@dataclass(frozen=True)
class Sharing:
    """A plan of rounds, and the ranks behind each training view."""

    plan: Plan
    owners: tuple[int, ...]  # rank that owns each view, and holds its photo
    rank_sets: tuple[int, ...]  # bitmask of the ranks that contribute to each view, its owner among them

    @staticmethod
    def alone(plan: Plan) -> Sharing:
        """One rank, which owns all."""
        return Sharing(plan, (0,) * plan.count, (1,) * plan.count)

    def state_dict(self) -> dict[str, Any]:
        plan = {f.name: getattr(self.plan, f.name) for f in fields(self.plan) if f.init}
        return {"plan": plan, "owners": self.owners, "rank_sets": self.rank_sets}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Sharing:
        return Sharing(Plan(**state["plan"]), state["owners"], state["rank_sets"])

    def describe(self) -> str:
        """One line for the log: what rounds are like, compared to what they could be."""
        views, ranks = self.plan.count, self.plan.ranks
        seen_by = sum(mask.bit_count() for mask in self.rank_sets) / views
        line = f"A view is seen by {seen_by:.1f} ranks on average."
        if ranks == 1:
            return line
        rounds = len(rounds_of_epoch(self.plan))
        apart = self.plan.occupied == self.rank_sets
        bound = lower_bound(self.rank_sets, ranks, self.plan.views_per_round)
        kept = "so that they meet on few ranks" if apart else "as many on each rank"
        return line + f" Rounds of {views / rounds:.2f} views, {kept} (apart: at most {views / bound:.2f})."


def share(
    plan: Plan,
    position: int,
    footprints: np.ndarray,
    views_per_round: int,
    consolidate: Consolidation,
    owners: Sequence[int] | None = None,
) -> Sharing:
    """The sharing that takes over from a plan at a position.

    Rounds of one view are in the order of one rank. Rounds of several are packed (``packing.py``) by the ranks that see
    a view, or, without consolidation, by its owner alone. "auto" consolidates if that makes few rounds more.

    Args:
        footprints: [V, K] how much each rank sees of each training view; zero: nothing.
        owners: those that were given before, and have the photos.
    """
    ranks = footprints.shape[1]
    owners = tuple(assign_owners(footprints) if owners is None else owners)
    bits = [1 << rank for rank in range(ranks)]
    rank_sets = tuple(
        sum(bit for bit, sees in zip(bits, row, strict=True) if sees) | bits[owner]
        for row, owner in zip((footprints > 0).tolist(), owners, strict=True)
    )
    if views_per_round == 1 or ranks == 1:
        in_order = plan.followed(position, views_per_round=views_per_round, ranks=1, occupied=None)
        return Sharing(in_order, owners, rank_sets)
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
