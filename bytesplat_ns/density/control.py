"""Which strategy a run has, and when it acts: from the model's options to ``Strategy`` and ``DensitySchedule``."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from bytesplat_ns.density.base import Gather, Strategy
from bytesplat_ns.density.mcmc import MCMCOptions, MCMCStrategy
from bytesplat_ns.density.pruning import Pruning, PruningOptions, PruningSchedule, Views
from bytesplat_ns.density.schedule import DensitySchedule
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.density.strategy import DefaultStrategy, DensityOptions
from bytesplat_ns.ops.residency import residency_budget
from bytesplat_ns.optim import GaussianAdam
from bytesplat_ns.schedules import REFERENCE_IMAGES, Timeline

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModelConfig

SETTLING = 5
"""Images that a Gaussian which has moved is given at least. In runs of 1,000 images on 22 photos, 5 instead of 22 was
worth +0.5 dB on an indoor object and -0.2 dB on an aerial scene (means of three seeds)."""

Options = TypeVar("Options", DensityOptions, MCMCOptions, PruningOptions)


def density_control(
    options: ByteSplatModelConfig,
    timeline: Timeline,
    photos: int,
    store: GaussianStore,
    optimizer: GaussianAdam,
    seed: int,
    gather: Gather,
) -> Strategy:
    """The strategy that the options name, on this run's timeline with so many photos."""
    schedule = density_schedule(options, timeline, photos)
    if options.strategy == "mcmc":
        return MCMCStrategy(store, optimizer, _part(MCMCOptions, options), schedule, seed, gather)
    return DefaultStrategy(store, optimizer, _part(DensityOptions, options), schedule, seed, gather)


def density_schedule(options: ByteSplatModelConfig, timeline: Timeline, photos: int) -> DensitySchedule:
    """Splatfacto's density schedule on this run's timeline.

    However short the run, a refinement waits for what it judges by (but no longer than splatfacto does): by gradient,
    until all photos have been seen since the last one; sampling, until what has moved could find its place. Sampling
    never resets opacities.
    """
    sampling = options.strategy == "mcmc"
    wait = SETTLING if sampling else photos
    every = timeline.images(options.refine_every, at_least=min(wait, options.refine_every))
    pause = min(photos, timeline.images(REFERENCE_IMAGES // 10)) + every
    reset_every = timeline.images(options.reset_alpha_every * options.refine_every, at_least=2 * pause)
    return DensitySchedule(
        start=timeline.images(options.warmup_length),
        stop=timeline.images(options.stop_split_at),
        every=every,
        reset_every=None if sampling else reset_every,
        pause_after_reset=0 if sampling else pause,
        stop_screen_size=timeline.images(options.stop_screen_size_at, at_least=0),
        total=timeline.total,
    )


def pruning(
    options: ByteSplatModelConfig, timeline: Timeline, photos: int, strategy: Strategy, views: Views
) -> Pruning | None:
    """Pruning beside a strategy, so that tile lists fit; None if the options, or the lack of a budget, say so.

    However short the run, a round is judged when all photos have been seen since (but no later than options say).
    """
    part = _part(PruningOptions, options)
    budget = part.prune_budget or residency_budget(strategy.store.device)
    if part.prune_share == 0.0 or budget is None:
        return None
    schedule = PruningSchedule(
        start=timeline.images(options.prune_start),
        stop=timeline.images(options.prune_stop),
        every=timeline.images(options.prune_every, at_least=min(photos, options.prune_every)),
        density=strategy.schedule,
    )
    return Pruning(strategy.store, part, schedule, budget, views, strategy.limit, strategy.gather)


def _part(kind: type[Options], options: ByteSplatModelConfig) -> Options:
    """The model's options that have a namesake in this dataclass."""
    return kind(**{f.name: getattr(options, f.name) for f in fields(kind)})
