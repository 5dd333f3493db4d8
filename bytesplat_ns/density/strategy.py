"""Adaptive density control of 3DGS (Kerbl et al. 2023, section 5), as splatfacto configures it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytesplat_ns.density import philox
from bytesplat_ns.density.schedule import DensitySchedule
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.layout import ABSGRAD, MEAN2D, ROW_WIDTH_WITH_STATISTICS, Cameras, Records
from bytesplat_ns.optim import GaussianAdam

Gather = Callable[[Tensor], Tensor]
"""Concatenates a tensor's rows over all ranks, in the order of ranks. With one rank: the identity."""

GRADIENT_UNIT = 2.0**-32
"""Unit of the summed screen gradient. Thresholds are around 1e-3, so one view's rounding is 1e-7 of them."""

GRADIENT_MAX = 2.0**16
"""Largest screen gradient of one view that counts: leaves room for 2^15 views in an int64."""


@dataclass(frozen=True)
class DensityOptions:
    """Thresholds of density control, named after splatfacto's options and with its values."""

    cull_alpha_thresh: float = 0.1
    """opacity below which a Gaussian is pruned; a reset lowers opacities to twice this"""
    cull_scale_thresh: float = 0.5
    """largest standard deviation above which a Gaussian is pruned, world units"""
    cull_screen_size: float = 0.15
    """radius above which a Gaussian is pruned, as a part of the larger image side"""
    densify_grad_thresh: float = 0.0008
    """mean screen gradient of its views above which a Gaussian is duplicated or split, per half image side"""
    use_absgrad: bool = True
    """take the sum over pixels of absolute gradients (AbsGS, Ye et al. 2024) instead of the gradient"""
    densify_size_thresh: float = 0.01
    """largest standard deviation up to which a Gaussian is duplicated; larger ones are split, world units"""
    n_split_samples: int = 2
    """children that replace a split Gaussian, each smaller by 0.8 times their number"""
    split_screen_size: float = 0.05
    """radius above which a Gaussian is split, as a part of the larger image side"""
    max_gaussians: int = 3_000_000
    """never more Gaussians than this, over all ranks"""

    def __post_init__(self) -> None:
        if not 0.0 < self.cull_alpha_thresh < 0.5:
            raise ValueError(f"cull_alpha_thresh is doubled by resets, so in (0, 0.5): {self.cull_alpha_thresh}.")
        if self.n_split_samples < 2:
            raise ValueError(f"n_split_samples must be at least 2: {self.n_split_samples}.")
        if self.max_gaussians < 1:
            raise ValueError(f"max_gaussians must be at least 1: {self.max_gaussians}.")


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
    reset: bool = False  # opacities were lowered


class DefaultStrategy:
    """Duplicates, splits, prunes and resets the Gaussians of a store.

    A refinement decides about each Gaussian by what it was before. Those with a high mean screen gradient are
    duplicated if small and split if large. Those that are large on the screen are split (gsplat's strategy of
    the same name may duplicate them too). Transparent, huge and non-finite ones are pruned; children that would
    be pruned at once are not made.

    - If no Gaussian would pass, only the non-finite ones are pruned.
    - If growth would exceed ``max_gaussians``, the highest mean gradients grow; of equal ones the lower ids.
    - If there are more than ``max_gaussians`` before any growth, the most opaque stay; equal opacities, as at
      the start of a run, are thinned evenly over the ids.

    The outcome depends on ids, not on rows: shuffled, or spread over ranks, the same Gaussians come out. The
    strategy has no state of its own: its statistics are columns of the store.
    """

    def __init__(
        self,
        store: GaussianStore,
        optimizer: GaussianAdam,
        options: DensityOptions,
        schedule: DensitySchedule,
        seed: int,
        gather: Gather = lambda rows: rows,
    ) -> None:
        self.store = store
        self.optimizer = optimizer
        self.options = options
        self.schedule = schedule
        self.seed = seed
        self.gather = gather
        # Over the views since the last refinement. Fixed point makes the sum independent of its order.
        store.register("density.gradient", dtype=torch.int64)  # sum, in GRADIENT_UNIT per half image side
        store.register("density.views", dtype=torch.int32)  # how many saw the Gaussian
        store.register("density.radius")  # largest, as a part of the larger image side

    @torch.no_grad()
    def observe(self, records: Records, rows: Tensor, cameras: Cameras) -> None:
        """Add a round to the statistics.

        Args:
            records: the M visible pairs of the round.
            rows: [M, 14] gradient rows with statistics, of a loss that is a sum over views.
            cameras: the round's views.
        """
        assert rows.shape == (len(records), ROW_WIDTH_WITH_STATISTICS), "rows come without statistics"
        sizes = cameras.sizes[records.view.long()].float()  # [M, 2] width, height in pixels
        gaussian = records.gaussian.long()
        gradient = (rows[:, ABSGRAD if self.options.use_absgrad else MEAN2D] * (sizes / 2)).norm(dim=1)
        gradient = gradient.nan_to_num(0.0).clamp(max=GRADIENT_MAX).double()
        columns = self.store.columns
        columns["density.gradient"].index_add_(0, gaussian, (gradient / GRADIENT_UNIT).round().long())
        columns["density.views"].index_add_(0, gaussian, torch.ones_like(records.gaussian))
        columns["density.radius"].scatter_reduce_(0, gaussian, records.radius / sizes.amax(dim=1), "amax")

    def update(self, before: int, after: int) -> DensityReport | None:
        """Do what the schedule has for the round that took the images seen from ``before`` to ``after``.

        Call it after the optimizer step. Returns None if nothing was due.
        """
        report = self.refine(after) if self.schedule.refines_at(before, after) else None
        if self.schedule.resets_at(before, after):
            self.reset_opacities()
            report = replace(report or DensityReport(*self._sum(len(self.store))), reset=True)
        return report

    @torch.no_grad()
    def refine(self, seen: int) -> DensityReport:
        """Grow and prune by the statistics, then start them anew. ``seen``: images seen so far.

        Raises:
            FloatingPointError: no Gaussian is finite.
        """
        options, schedule, store = self.options, self.schedule, self.store
        opacity = store.parameters["opacities"].squeeze(1).sigmoid()
        size = store.parameters["scales"].exp().amax(dim=1)  # largest standard deviation, world units
        gradient, radius = self._mean_gradient(), store.columns["density.radius"]
        sums = [parameter.flatten(1).sum(dim=1) for parameter in store.parameters.values()]
        finite = torch.stack(sums).isfinite().all(dim=0)

        # 1. What each Gaussian deserves, regardless of the others.
        high = gradient > options.densify_grad_thresh
        split = high & (size > options.densify_size_thresh)
        doomed = (opacity < options.cull_alpha_thresh) | ~finite
        size_limit = options.cull_scale_thresh if schedule.prunes_size(seen) else math.inf
        if schedule.uses_screen_size(seen):
            split |= radius > options.split_screen_size
            if schedule.prunes_size(seen):
                doomed |= radius > options.cull_screen_size
        pruned = doomed | (size > size_limit)
        barren = doomed | (torch.where(split, size / self._shrinkage, size) > size_limit)

        # 2. What the scene as a whole allows.
        total, n_finite, alive = self._sum(len(store), finite.sum(), (~pruned).sum())
        if total > 0 and n_finite == 0:
            raise FloatingPointError(
                f"Training diverged: after {seen} images all {total} Gaussians hold NaN or infinite values. "
                "Lower the learning rates, or look for broken poses in the data set."
            )
        if alive == 0:
            pruned = barren = ~finite
            alive = n_finite
        wish = (high | split) & ~barren
        # A parent gives its place to its children, unless it is pruned and thus not among the alive.
        cost = torch.where(split, options.n_split_samples - 1, 1) + pruned
        grown = self._admit(wish, alive, gradient, store.ids, cost)

        # 3. One edit of all tables.
        replaced = grown & split
        self._breed((~pruned & ~replaced).nonzero().squeeze(1), grown.nonzero().squeeze(1), split, seen)
        for name in ("density.gradient", "density.views", "density.radius"):
            store.columns[name].zero_()
        capped = self.limit()
        counts = (grown & ~split, replaced, pruned & ~replaced & finite, ~finite, wish & ~grown)
        return DensityReport(*self._sum(len(store), *(mask.sum() for mask in counts)), capped=capped)

    @torch.no_grad()
    def limit(self) -> int:
        """Remove what exceeds ``max_gaussians``, as a run may start above it. Returns how many went."""
        (total,) = self._sum(len(self.store))
        if total <= self.options.max_gaussians:
            return 0
        opacity = self.store.parameters["opacities"].squeeze(1)
        # Fibonacci hashing: ids whose multiple of the golden ratio is low are evenly spaced, and none tie.
        spread = self.store.ids * (0x9E3779B97F4A7C15 - 2**64)
        everyone = torch.ones_like(opacity, dtype=torch.bool)
        self.store.keep(self._admit(everyone, 0, opacity, spread, torch.ones_like(self.store.ids)))
        return total - self.options.max_gaussians

    @torch.no_grad()
    def reset_opacities(self) -> None:
        """Lower opacities to at most twice the pruning threshold and forget their momentum."""
        ceiling = 2.0 * self.options.cull_alpha_thresh
        self.store.parameters["opacities"].clamp_(max=math.log(ceiling / (1.0 - ceiling)))
        self.optimizer.forget("opacities")

    @property
    def _shrinkage(self) -> float:
        return 0.8 * self.options.n_split_samples

    def _mean_gradient(self) -> Tensor:
        """[N] float32, mean over the views that saw a Gaussian; zero if none did."""
        columns = self.store.columns
        total = columns["density.gradient"].double() * GRADIENT_UNIT
        return (total / columns["density.views"].clamp(min=1)).float()

    def _breed(self, kept: Tensor, grown: Tensor, split: Tensor, seen: int) -> None:
        """Keep the rows ``kept`` [n] and append children of the rows ``grown`` [m].

        A row has one child, its copy, or where ``split`` [N] several, samples of its own distribution.
        """
        store, samples = self.store, self.options.n_split_samples
        grown = grown[store.ids[grown].argsort()]
        litter = torch.where(split[grown], samples, 1)
        family = torch.arange(len(grown), device=store.device).repeat_interleave(litter)
        parents = grown[family]
        nth = torch.arange(len(family), device=store.device) - (litter.cumsum(0) - litter)[family]

        everywhere = self.gather(store.ids[parents]).sort().values
        ids = store.next_id + torch.searchsorted(everywhere, store.ids[parents]) + nth
        store.next_id += len(everywhere)

        sampled = split[parents][:, None].float()
        scales = store.parameters["scales"][parents]  # log
        noise = philox.normal(store.ids[grown], 3 * samples, seed=self.seed, step=seen)
        noise = noise.view(-1, samples, 3)[family, nth]
        offset = _rotate(store.parameters["quats"][parents], scales.exp() * noise)
        changes = {
            "means": store.parameters["means"][parents] + sampled * offset,
            "scales": scales - sampled * math.log(self._shrinkage),
        }
        store.edit(kept, parents, ids, changes)

    def _admit(self, candidates: Tensor, occupied: int, priority: Tensor, tie: Tensor, cost: Tensor) -> Tensor:
        """Those of the candidates [N] bool that fit under ``max_gaussians`` beside so many occupied places.

        The candidates of all ranks line up by falling priority [N], then by rising tie [N] int64 (unique), and
        enter until the cost [N] int64 of one does not fit.
        """
        priorities, ties, costs = (self.gather(column[candidates]) for column in (priority, tie, cost))
        order = ties.argsort()
        order = order[priorities[order].argsort(descending=True, stable=True)]
        n = int((costs[order].cumsum(0) <= self.options.max_gaussians - occupied).sum())
        if n == 0:
            return torch.zeros_like(candidates)
        last = order[n - 1]
        ahead = (priority > priorities[last]) | ((priority == priorities[last]) & (tie <= ties[last]))
        return candidates & ahead

    def _sum(self, *counts: int | Tensor) -> list[int]:
        """The counts, each summed over all ranks."""
        here = torch.stack([torch.as_tensor(count, device=self.store.device) for count in counts])
        return self.gather(here[None]).sum(dim=0).tolist()


def _rotate(quats: Tensor, vectors: Tensor) -> Tensor:
    """Vectors [n, 3] turned by quaternions [n, 4] (w, x, y, z; of any norm)."""
    w, axis = torch.nn.functional.normalize(quats, dim=1).split([1, 3], dim=1)
    turned = 2.0 * torch.linalg.cross(axis, vectors)
    return vectors + w * turned + torch.linalg.cross(axis, turned)
