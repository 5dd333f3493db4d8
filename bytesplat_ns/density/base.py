"""What every way of controlling density has in common: its life in a run, and the cap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bytesplat_ns.density.schedule import DensitySchedule
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.layout import Cameras, Records
from bytesplat_ns.optim import GaussianAdam

Gather = Callable[[Tensor], Tensor]
"""Concatenates a tensor's rows over all ranks, in the order of ranks. With one rank: the identity."""


@dataclass(frozen=True)
class DensityReport:
    """What a change of density did, counted over all ranks."""

    gaussians: int  # afterwards
    duplicated: int = 0  # one more each
    split: int = 0  # n_split_samples - 1 more each
    pruned: int = 0  # transparent or too large
    non_finite: int = 0  # pruned because a parameter is NaN or infinite
    refused: int = 0  # would have been duplicated or split but for max_gaussians
    capped: int = 0  # removed because there were more than max_gaussians
    relocated: int = 0  # dead ones replaced by copies of live ones
    reset: bool = False  # opacities were lowered


class Strategy(ABC):
    """Changes the Gaussians of a store in the course of a run. A round of training calls, in this order:

    1. ``observes``: whether the round's gradient rows must come with statistics;
    2. ``regularizers``, to add to the gradients of the optimizer step;
    3. ``observe``, if it ``observes``, and ``update``, after the optimizer step.

    On a GPU ``regularizers`` and ``observe`` are called for one round and recorded for those like it: they launch work
    on tensors, wait for none of it, and use no number that changes before the tables do.

    The outcome depends on ids, not on rows: shuffled, or spread over ranks, the same Gaussians come out. What a
    strategy remembers are columns of the store, which follow their rows and are saved with it.

    Attributes:
        absgrad: whether ``observe`` reads this of the gradient rows, beyond the gradients themselves.
        total: Gaussians of all ranks. It is kept, for a sum in each round would wait for the device.
    """

    absgrad: bool = False

    def __init__(
        self,
        store: GaussianStore,
        optimizer: GaussianAdam,
        schedule: DensitySchedule,
        seed: int,
        max_gaussians: int,
        gather: Gather,
    ) -> None:
        self.store = store
        self.optimizer = optimizer
        self.schedule = schedule
        self.seed = seed
        self.max_gaussians = max_gaussians
        self.gather = gather
        (self.total,) = self._sum(len(store))

    @abstractmethod
    def observes(self, seen: int) -> bool:
        """Whether the round that begins after ``seen`` images is worth an ``observe``."""

    @abstractmethod
    def observe(self, records: Records, rows: Tensor, cameras: Cameras) -> None:
        """Add a round to the statistics.

        Args:
            records: the M visible pairs of the round.
            rows: [M, 14] gradient rows with statistics, of a loss that is a sum over views.
            cameras: the round's views.
        """

    def regularizers(self, views: int) -> dict[str, Tensor]:
        """Gradients of the strategy's own penalties for a round of so many views, by parameter name."""
        del views
        return {}

    @abstractmethod
    def update(self, before: int, after: int) -> DensityReport | None:
        """Do what the schedule has for the round that took the images seen from ``before`` to ``after``.

        Returns None if no change of density was due.
        """

    @torch.no_grad()
    def limit(self) -> int:
        """Remove what exceeds ``max_gaussians``, as a run may start above it. Returns how many went.

        The most opaque stay; equal opacities, as at the start of a run, are thinned evenly over the ids.
        """
        (self.total,) = self._sum(len(self.store))
        excess = self.total - self.max_gaussians
        if excess <= 0:
            return 0
        opacity = self.store.parameters["opacities"].squeeze(1)
        # Fibonacci hashing: ids whose multiple of the golden ratio is low are evenly spaced, and none tie.
        spread = self.store.ids * (0x9E3779B97F4A7C15 - 2**64)
        everyone = torch.ones_like(opacity, dtype=torch.bool)
        self.store.keep(self._admit(everyone, 0, opacity, spread, torch.ones_like(self.store.ids)))
        self.total = self.max_gaussians
        return excess

    def _finite(self) -> Tensor:
        """[N] bool, Gaussians without NaN and infinities."""
        sums = [parameter.detach().flatten(1).sum(dim=1) for parameter in self.store.parameters.values()]
        return torch.stack(sums).isfinite().all(dim=0)

    def _refuse_divergence(self, total: int, n_finite: int, seen: int) -> None:
        if total > 0 and n_finite == 0:
            raise FloatingPointError(
                f"Training diverged: after {seen} images all {total} Gaussians hold NaN or infinite values. "
                "Lower the learning rates, or look for broken poses in the data set."
            )

    def _admit(self, candidates: Tensor, occupied: int, priority: Tensor, tie: Tensor, cost: Tensor) -> Tensor:
        """Those of the candidates [N] bool that fit under ``max_gaussians`` beside so many occupied places."""
        return admit(candidates, self.max_gaussians - occupied, priority, tie, cost, self.gather)

    def _name_children(self, parents: Tensor) -> Tensor:
        """[m] int64, new ids for the children of the rows ``parents`` [m], which are in the order of their ids.

        The children of all ranks are numbered on in the order of their parents' ids, siblings in their own.
        """
        store, own = self.store, self.store.ids[parents]
        nth = torch.arange(len(own), device=store.device) - torch.searchsorted(own, own)
        everywhere = self.gather(own).sort().values
        ids = store.next_id + torch.searchsorted(everywhere, own) + nth
        store.next_id += len(everywhere)
        return ids

    def _sum(self, *counts: int | Tensor) -> list[int]:
        """The counts, each summed over all ranks."""
        here = torch.stack([torch.as_tensor(count, device=self.store.device) for count in counts])
        return self.gather(here[None]).sum(dim=0).tolist()


def admit(candidates: Tensor, room: int, priority: Tensor, tie: Tensor, cost: Tensor, gather: Gather) -> Tensor:
    """Those of the candidates [N] bool for which there is room.

    The candidates of all ranks line up by falling priority [N], then by rising tie [N] int64 (unique), and enter until
    the cost [N] int64 of one does not fit.
    """
    priorities, ties, costs = (gather(column[candidates]) for column in (priority, tie, cost))
    order = ties.argsort()
    order = order[priorities[order].argsort(descending=True, stable=True)]
    n = int((costs[order].cumsum(0) <= room).sum())
    if n == 0:
        return torch.zeros_like(candidates)
    last = order[n - 1]
    ahead = (priority > priorities[last]) | ((priority == priorities[last]) & (tie <= ties[last]))
    return candidates & ahead
