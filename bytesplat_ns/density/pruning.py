"""Pruning for the hardware: fewer Gaussians until tile lists fit, as long as the photos do not suffer.

A round surveys the training views (``density.survey``) and removes the Gaussians that do least harm for what they cost
(Hanson et al., "PUP 3D-GS", 2025, prune by sensitivity; ByteSplat by quality over hardware cost). What is left recovers
until the next round, when the round is judged by the PSNR of some training views: if it has cost too much, the removed
Gaussians come back as they were, and the next round is half as large. Until then they are kept, also in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bytesplat_ns.density.base import Gather, admit
from bytesplat_ns.density.schedule import DensitySchedule, multiples
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.density.survey import Survey


@dataclass(frozen=True)
class PruningOptions:
    """How much is pruned, and how carefully."""

    prune_share: float = 0.1
    """largest part of the Gaussians that one round removes; 0: never prune"""
    prune_budget: int | None = None
    """entries of a tile's list that are within its budget"""
    prune_cost: Literal["uniform", "root", "tiles"] = "root"
    """what the harm of a removal is divided by: nothing; the root of the number of tiles, those beyond the budget
    counted twice; or this number, and then only in tiles over budget"""
    prune_guard: float = 0.05
    """PSNR that a round may cost, dB"""
    prune_veto: float = 0.9
    """largest contribution to a pixel from which on a Gaussian is never pruned"""

    def __post_init__(self) -> None:
        if not 0.0 <= self.prune_share < 1.0:
            raise ValueError(f"prune_share is a part of the Gaussians, in [0, 1): {self.prune_share}.")
        if self.prune_budget is not None and self.prune_budget < 1:
            raise ValueError(f"prune_budget must be at least one entry of a list: {self.prune_budget}.")
        if self.prune_guard < 0.0:
            raise ValueError(f"prune_guard must be zero or more dB: {self.prune_guard}.")
        if not 0.0 < self.prune_veto <= 1.0:
            raise ValueError(f"prune_veto is an opacity, in (0, 1]: {self.prune_veto}.")


@dataclass(frozen=True)
class PruningSchedule:
    """Moments in images seen: multiples of ``every`` from ``start`` to ``stop``; each round is judged ``every`` later.

    A round is left out where an opacity reset would fall into the span before or after it: what Gaussians are worth,
    and what their removal has cost, could not be told.
    """

    start: int
    stop: int
    every: int
    density: DensitySchedule

    def round_at(self, before: int, after: int) -> int | None:
        """The moment of the round that is due after these images, if one is."""
        for moment in multiples(self.every, before, after):
            end = moment + self.every
            # An opacity reset at the very end comes after the judgement (``ByteSplatPipeline.train_round``).
            quiet = not self.density.resets_at(moment - self.every, end - 1)
            if self.start <= moment <= self.stop and end <= self.density.total and quiet:
                return moment
        return None


class Views(Protocol):
    """Training views, looked at as the Gaussians are now. With several ranks, all of them ask together."""

    def survey(self, budget: int) -> Survey:
        """What the training views say about this rank's Gaussians."""

    def lengths(self) -> Tensor:
        """[T] int32, effective lengths of tile lists; over all ranks those of each view once."""

    def psnr(self) -> Tensor:
        """[n] dB, of some views; over all ranks each of them once."""


@dataclass(frozen=True)
class Lists:
    """Effective lengths of the lists of all tiles of the training views."""

    within: float  # part of the tiles within budget
    median: int
    p95: int
    longest: int

    @classmethod
    def of(cls, lengths: Tensor, budget: int) -> Lists:
        ordered = lengths.sort().values
        at = (0.5 * len(ordered), 0.95 * len(ordered))
        median, p95, longest = ordered[[*(min(int(i), len(ordered) - 1) for i in at), -1]].tolist()
        return cls(float((lengths <= budget).double().mean()), median, p95, longest)

    def __str__(self) -> str:
        return f"{self.within:.1%} of tiles within budget, lists {self.median}/{self.p95}/{self.longest} (P50/P95/max)"


@dataclass(frozen=True)
class PruningReport:
    """A round, once it has been judged; one that found nothing to do is judged at once. Counted over all ranks."""

    pruned: int  # Gaussians; they are back if the round was undone
    kept: bool
    budget: int
    before: Lists
    after: Lists
    psnr_before: float  # dB, of the views that judge
    psnr_after: float  # dB, after recovery

    def values(self) -> dict[str, float | int]:
        """For a line of ``metrics.jsonl``."""
        lists = {"before": self.before, "after": self.after}
        values = {f"lists_{name}_{when}": value for when, of in lists.items() for name, value in vars(of).items()}
        psnrs = {"psnr_judged_before": self.psnr_before, "psnr_judged_after": self.psnr_after}
        return {"pruned": self.pruned, "kept": int(self.kept), "budget": self.budget, **values, **psnrs}

    def __str__(self) -> str:
        if not self.pruned:
            return f"Nothing to prune: budget {self.budget}, {self.before}."
        return (
            f"Pruned {self.pruned:,} Gaussians, {'kept' if self.kept else 'UNDONE'}: budget {self.budget}, "
            f"{self.before} -> {self.after}; PSNR {self.psnr_before:.2f} -> {self.psnr_after:.2f} dB."
        )


@dataclass
class _Round:
    """A round that has not been judged yet."""

    due: int  # images seen, when it will be
    total: int  # pruned over all ranks
    before: Lists
    psnr: float  # before it
    removed: dict[str, Tensor]  # rows of the store's tables, of this rank


class Pruning:
    """Prunes the Gaussians of a store in the course of a run. The outcome depends on ids, not on rows or ranks.

    Args:
        budget: entries of a tile's list that are within it.
        views: what the Gaussians are judged by.
        limit: to call when Gaussians have come or gone (``Strategy.limit``).
    """

    def __init__(
        self,
        store: GaussianStore,
        options: PruningOptions,
        schedule: PruningSchedule,
        budget: int,
        views: Views,
        limit: Callable[[], int],
        gather: Gather = lambda rows: rows,
    ) -> None:
        self.store = store
        self.options = options
        self.schedule = schedule
        self.budget = budget
        self.views = views
        self.limit = limit
        self.gather = gather
        self._undone = 0  # rounds; each halves those that follow
        self._pending: _Round | None = None

    def update(self, before: int, after: int) -> list[PruningReport]:
        """Do what is due after the training round that took the images seen from ``before`` to ``after``.

        Returns the reports of the rounds that have been judged.
        """
        reports = []
        if self._pending is not None and after >= self._pending.due:
            reports.append(self._judge(self._pending))
        moment = self.schedule.round_at(before, after)
        if moment is not None:
            idle = self._prune(moment + self.schedule.every)
            reports += [idle] if idle is not None else []
        return reports

    @torch.no_grad()
    def _prune(self, due: int) -> PruningReport | None:
        """Remove what does least harm for its cost; or report that 95 % of the tiles are within budget already."""
        lists, psnr = self._lists(), self._psnr()
        idle = PruningReport(0, True, self.budget, lists, lists, psnr, psnr)
        if lists.p95 <= self.budget:
            return idle
        survey = self.views.survey(self.budget)
        seen = (survey.crowded if self.options.prune_cost == "tiles" else survey.tiles) > 0
        candidates = seen & (survey.contribution < self.options.prune_veto)
        counts = torch.tensor([[len(candidates), candidates.sum()]], device=self.store.device)
        total, possible = self.gather(counts).sum(dim=0).tolist()
        count = min(int(total * self.options.prune_share / 2**self._undone), possible)
        if count == 0:
            return idle
        ids = self.store.ids
        pruned = admit(candidates, count, -self._worth(survey), ids, torch.ones_like(ids), self.gather)
        self.store.settle()
        removed = {name: table[pruned] for name, table in self.store.tables().items()}
        self.store.keep(~pruned)
        self.limit()
        self._pending = _Round(due, count, lists, psnr, removed)
        return None

    def _worth(self, survey: Survey) -> Tensor:
        """[N] float64, harm for its cost. What does no harm at all goes in the order of cost."""
        power = {"uniform": 0.0, "root": 0.5, "tiles": 1.0}[self.options.prune_cost]
        return (survey.harm + 1).double() / (survey.tiles + survey.beyond).double().pow(power)

    @torch.no_grad()
    def _judge(self, round: _Round) -> PruningReport:
        self._pending = None
        psnr = self._psnr()
        after = self._lists()
        kept = psnr >= round.psnr - self.options.prune_guard
        if not kept:
            self.store.settle()
            tables = self.store.tables()
            self.store.replace({name: torch.cat([table, round.removed[name]]) for name, table in tables.items()})
            self.limit()
            self._undone += 1
        return PruningReport(round.total, kept, self.budget, round.before, after, round.psnr, psnr)

    def _lists(self) -> Lists:
        return Lists.of(self.gather(self.views.lengths()), self.budget)

    def _psnr(self) -> float:
        """Mean over the views that judge, added up in an order that does not depend on ranks."""
        return float(self.gather(self.views.psnr().double()).sort().values.mean())

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the store does not hold: the round that has not been judged, with the rows of all ranks."""
        state: dict[str, Any] = {"undone": self._undone, "round": None}
        if self._pending is not None:
            removed = {name: self.gather(rows) for name, rows in self._pending.removed.items()}
            order = removed["ids"].argsort()
            removed = {name: rows[order] for name, rows in removed.items()}
            state["round"] = vars(self._pending) | {"before": list(astuple(self._pending.before)), "removed": removed}
        return state

    def load_state_dict(self, state: Mapping[str, Any], rank: int = 0, ranks: int = 1) -> None:
        """Goes on from a checkpoint, as one of so many ranks: each keeps a part of the removed rows."""
        self._undone, round = state["undone"], state["round"]
        if round is not None:
            own = round["removed"]["ids"] % ranks == rank
            removed = {name: rows[own].to(self.store.device) for name, rows in round["removed"].items()}
            self._pending = _Round(**round | {"before": Lists(*round["before"]), "removed": removed})
