"""Adaptive density control of 3DGS (Kerbl et al. 2023, section 5), as splatfacto configures it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.density import philox
from bytesplat_ns.density.base import DensityReport, Gather, Strategy
from bytesplat_ns.density.rotation import rotate
from bytesplat_ns.density.schedule import DensitySchedule
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.layout import GRADIENT_UNIT, ROW_WIDTH_WITH_STATISTICS, Cameras, Observations, Records
from bytesplat_ns.optim import GaussianAdam


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


class DefaultStrategy(Strategy):
    """Duplicates, splits, prunes and resets the Gaussians of a store.

    A refinement decides about each Gaussian by what it was before. Those with a high mean screen gradient are
    duplicated if small and split if large. Those that are large on the screen are split (gsplat's strategy of
    the same name may duplicate them too). Transparent, huge and non-finite ones are pruned; children that would
    be pruned at once are not made.

    - If no Gaussian would pass, only the non-finite ones are pruned.
    - If growth would exceed ``max_gaussians``, the highest mean gradients grow; of equal ones the lower ids.
    - If there are more than ``max_gaussians`` before any growth, none grow and ``limit`` thins them.
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
        super().__init__(store, optimizer, schedule, seed, options.max_gaussians, gather)
        self.options = options
        self.absgrad = options.use_absgrad
        # Over the views since the last refinement.
        store.register("density.gradient", dtype=torch.int64)
        store.register("density.views", dtype=torch.int32)
        store.register("density.radius")

    @property
    def observations(self) -> Observations:
        """The statistics as they are now; live, until rows come or go."""
        return Observations(*(self.store.columns[f"density.{f.name}"] for f in fields(Observations)))

    def observes(self, seen: int) -> bool:
        return self.schedule.observes(seen)

    @torch.no_grad()
    def observe(self, records: Records, rows: Tensor, cameras: Cameras) -> None:
        assert rows.shape == (len(records), ROW_WIDTH_WITH_STATISTICS), "rows come without statistics"
        ops.observe(records, rows, cameras, self.observations, self.options.use_absgrad)

    def update(self, before: int, after: int) -> DensityReport | None:
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
        gradient, radius = self._mean_gradient(), self.observations.radius
        finite = self._finite()

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
        self._refuse_divergence(total, n_finite, seen)
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
        for column in vars(self.observations).values():
            column.zero_()
        capped = self.limit()
        counts = (grown & ~split, replaced, pruned & ~replaced & finite, ~finite, wish & ~grown)
        return DensityReport(*self._sum(len(store), *(mask.sum() for mask in counts)), capped=capped)

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
        seen = self.observations
        return (seen.gradient.double() * GRADIENT_UNIT / seen.views.clamp(min=1)).float()

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

        sampled = split[parents][:, None].float()
        scales = store.parameters["scales"][parents]  # log
        noise = philox.normal(store.ids[grown], 3 * samples, seed=self.seed, step=seen)
        noise = noise.view(-1, samples, 3)[family, nth]
        offset = rotate(store.parameters["quats"][parents], scales.exp() * noise)
        changes = {
            "means": store.parameters["means"][parents] + sampled * offset,
            "scales": scales - sampled * math.log(self._shrinkage),
        }
        store.edit(kept, parents, self._name_children(parents), changes)
