"""Density control as sampling: Kheradmand et al., "3D Gaussian Splatting as Markov Chain Monte Carlo" (2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.density import philox
from bytesplat_ns.density.base import DensityReport, Gather, Strategy
from bytesplat_ns.density.schedule import DensitySchedule
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.layout import Cameras, Gaussians, Records
from bytesplat_ns.optim import GaussianAdam

GROWTH = 20
"""A refinement adds one Gaussian for each so many there are."""

OPACITY_UNIT = 2.0**-32
"""Unit of the summed opacity. In fixed point, so that the sum does not depend on its order."""

OPACITY_MAX = 1.0 - 2.0**-23
"""Largest opacity of a copy: its logit is finite."""


@dataclass(frozen=True)
class MCMCOptions:
    """Strengths of the sampling, named and valued as in gsplat's MCMCStrategy and nerfstudio's splatfacto."""

    min_opacity: float = 0.005
    """opacity up to which a Gaussian is dead and moves to a live one"""
    noise_lr: float = 5e5
    """noise on the means, in units of their learning rate and of the Gaussian's covariance"""
    mcmc_opacity_reg: float = 0.01
    """weight of the mean opacity in the loss of a view"""
    mcmc_scale_reg: float = 0.01
    """weight of the mean standard deviation in the loss of a view"""
    max_gaussians: int = 3_000_000
    """never more Gaussians than this, over all ranks"""

    def __post_init__(self) -> None:
        if not 0.0 < self.min_opacity < 0.5:
            raise ValueError(f"min_opacity is what counts as dead, so in (0, 0.5): {self.min_opacity}.")
        for name in ("noise_lr", "mcmc_opacity_reg", "mcmc_scale_reg"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be zero or positive: {getattr(self, name)}.")
        if self.max_gaussians < 1:
            raise ValueError(f"max_gaussians must be at least 1: {self.max_gaussians}.")


class MCMCStrategy(Strategy):
    """Moves dead Gaussians onto live ones, adds some more in the same way, and keeps all means in motion.

    In a refinement every dead Gaussian goes and a copy of a live one comes for it, and one more for each ``GROWTH``
    there are (rounded up), up to ``max_gaussians``. The live ones are drawn by opacity. One that is drawn shares its
    opacity and extent with its copies, so that together they look as it did (``share``), and all of them start
    without momentum. A copy is a new Gaussian with a new id, whichever dead one it stands for.

    Non-finite Gaussians are dead. If no Gaussian is alive, only the non-finite ones go.
    """

    def __init__(
        self,
        store: GaussianStore,
        optimizer: GaussianAdam,
        options: MCMCOptions,
        schedule: DensitySchedule,
        seed: int,
        gather: Gather = lambda rows: rows,
    ) -> None:
        super().__init__(store, optimizer, schedule, seed, options.max_gaussians, gather)
        self.options = options

    def observes(self, seen: int) -> bool:
        return False

    def observe(self, records: Records, rows: Tensor, cameras: Cameras) -> None:
        raise AssertionError("the parameters alone decide: there are no statistics")

    @torch.no_grad()
    def regularizers(self, views: int) -> dict[str, Tensor]:
        """Pull opacities and standard deviations down, so that what the photos do not hold up dies.

        The penalty of a view is mcmc_opacity_reg * mean(opacity) + mcmc_scale_reg * mean(standard deviation).
        """
        opacity = self._opacity().float()[:, None]
        extent = self.store.parameters["scales"].double().exp().float()
        part = views / max(self.total, 1)
        return {
            "opacities": self.options.mcmc_opacity_reg * part * opacity * (1.0 - opacity),
            "scales": self.options.mcmc_scale_reg * part / 3 * extent,
        }

    def update(self, before: int, after: int) -> DensityReport | None:
        self.add_noise(after, after - before)
        return self.refine(after) if self.schedule.refines_at(before, after) else None

    @torch.no_grad()
    def add_noise(self, seen: int, views: int = 1) -> None:
        """Shake the means of faint Gaussians, along their own axes.

        The step is covariance * normal noise * gate(opacity) * noise_lr * learning rate of the means. That rate is of a
        round, B times that of a view; the noise of B views adds up to sqrt(B) times that of one.

        Args:
            seen: images seen so far.
            views: of the round.
        """
        strength = self.options.noise_lr * self.optimizer.rates["means"] / math.sqrt(views)
        ops.shake(self.store.gaussians(), strength, self.options.min_opacity, seed=self.seed, step=seen)

    @torch.no_grad()
    def refine(self, seen: int) -> DensityReport:
        """Move the dead and grow. ``seen``: images seen so far.

        Raises:
            FloatingPointError: no Gaussian is finite.
        """
        store = self.store
        opacity = self._opacity().float()
        finite = self._finite()
        alive = finite & (opacity > self.options.min_opacity)
        total, n_finite, n_alive = self._sum(len(store), finite.sum(), alive.sum())
        self._refuse_divergence(total, n_finite, seen)
        if n_alive == 0:
            store.keep(finite)
            capped = self.limit()
            return DensityReport(self.total, non_finite=total - n_finite, capped=capped)
        target = max(n_alive, min(self.max_gaussians, total + -(-total // GROWTH)))
        copies = self._draw(opacity, alive, target - n_alive, seen)
        self._copy(alive, copies, opacity)
        capped = self.limit()
        grown = max(0, target - total)
        return DensityReport(
            self.total,
            duplicated=grown,
            relocated=target - n_alive - grown,
            pruned=max(0, total - target),
            non_finite=total - n_finite,
            capped=capped,
        )

    def _opacity(self) -> Tensor:
        """[N] float64. The last bit of a vectorized function depends on the row; in a float64 that is rounded to
        float32 later it does not matter."""
        return self.store.parameters["opacities"].detach().squeeze(1).double().sigmoid()

    def _draw(self, opacity: Tensor, alive: Tensor, n: int, seen: int) -> Tensor:
        """[N] int64, how often each Gaussian is drawn if ``n`` are, by opacity [N] among those ``alive`` [N] bool.

        Opacities lie end to end on a line, in the order of ids. Of n equal parts of the line each draws one point in
        it, with the random number of the id that the copy will have (stratified resampling, Kitagawa 1996): as many
        draws as independent ones on average, with less left to chance.
        """
        store = self.store
        ids, order = self.gather(store.ids[alive]).sort()
        ends = self.gather((opacity[alive].double() / OPACITY_UNIT).long())[order].cumsum(0)
        part = torch.arange(n, device=store.device)
        place = (part + philox.uniform(store.next_id + part, 1, seed=self.seed, step=seen)[:, 0].double()) / n
        drawn = torch.searchsorted(ends, (place * ends[-1]).long().clamp(max=ends[-1] - 1), right=True)
        times = torch.zeros_like(ids).index_add_(0, drawn, torch.ones_like(drawn))
        counts = torch.zeros_like(store.ids)
        counts[alive] = times[torch.searchsorted(ids, store.ids[alive])]
        return counts

    def _copy(self, alive: Tensor, copies: Tensor, opacity: Tensor) -> None:
        """Keep the rows ``alive`` [N] bool and append so many ``copies`` [N] of each, all sharing its ``opacity``."""
        store = self.store
        drawn = copies.nonzero().squeeze(1)
        shared, shrinkage = share(opacity[drawn], copies[drawn] + 1)
        logits = shared.clamp(self.options.min_opacity, OPACITY_MAX).logit()[:, None]
        store.parameters["opacities"][drawn] = logits.float()
        store.parameters["scales"][drawn] += shrinkage.log()[:, None].float()
        for name in Gaussians.PARAMETERS:
            self.optimizer.forget(name, drawn)

        drawn = drawn[store.ids[drawn].argsort()]
        parents = drawn.repeat_interleave(copies[drawn])
        store.edit(alive.nonzero().squeeze(1), parents, self._name_children(parents), {})


def share(opacity: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """What n Gaussians at one place must be to look like one (the paper's equation 9).

    Their opacities compose to the one's: 1 - (1 - o')^n = o. Their composed profile 1 - (1 - o' exp(-x^2 / 2 s'^2))^n
    has the integral of the one's along any line through the centre: s' = s o / sum_k C(n, k) (-1)^(k-1) o'^k / sqrt(k).
    (The paper's double sum over binomials, with its outer sum done.)

    Args:
        opacity: [m] in (0, 1).
        n: [m] int64, at least 1.

    Returns:
        [m] float64 opacity of each of the n, and [m] float64 factor of its standard deviations.
    """
    opacity = opacity.double().clamp(max=OPACITY_MAX)
    shared = -torch.expm1(torch.log1p(-opacity) / n)
    term, total = -torch.ones_like(shared), torch.zeros_like(shared)
    # C(n, k) o'^k < 16^k / k!, as -n log(1 - o') < 16: nothing is left after a hundred terms, however large n.
    for k in range(1, min(int(n.max()) if len(n) else 0, 100) + 1):
        term = term * -shared * (n - k + 1) / k
        total += term / math.sqrt(k)
    return shared, opacity / total
