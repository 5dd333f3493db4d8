"""When things happen in a run, counted in images seen.

Splatfacto's schedules are laid out in steps for a run of 30,000 one-image steps. Here the same numbers are *reference*
values: they stretch or shrink with the length of the run, so that a short run spends the same share of its images at
low resolution, in densification, and so on, instead of ending before it began. Counting images instead of optimizer
steps makes the schedule independent of how many views one step (round) holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

REFERENCE_IMAGES = 30_000
"""Length of the run for which splatfacto's schedule values are meant, in images."""


@dataclass(frozen=True)
class Timeline:
    """Maps reference values (images of a 30,000-image run) to images of this run.

    Args:
        total: images that this run sees.
        length: images for which schedules are laid out; ``total`` scales everything with the run,
            ``REFERENCE_IMAGES`` restores splatfacto's absolute steps.
    """

    total: int
    length: int

    def __post_init__(self) -> None:
        if self.total < 0 or self.length < 1:
            raise ValueError(
                f"A schedule needs at least one image: max-num-iterations is {self.total}, schedule-length "
                f"{self.length}. Give positive numbers (max-num-iterations 0 does not train, but leaves a checkpoint)."
            )

    @property
    def scale(self) -> float:
        return self.length / REFERENCE_IMAGES

    def images(self, reference: float, at_least: int = 1) -> int:
        """The reference value in images of this run, rounded, and not below ``at_least``."""
        return max(at_least, round(reference * self.scale))


@dataclass(frozen=True)
class LearningRate:
    """Exponential decay with a warm-up, as nerfstudio's ``ExponentialDecayScheduler``, in images of this run.

    Args:
        initial, final: rates at the start (after the warm-up) and at the end of the decay.
        decay: images from start to end of the decay, warm-up included.
        warmup: images of the warm-up (0: none), which starts at ``pre_warmup`` and rises along ``ramp``.
    """

    initial: float
    final: float
    decay: int = 1
    warmup: int = 0
    pre_warmup: float = 0.0
    ramp: str = "cosine"

    def __call__(self, seen: int) -> float:
        """The rate for a round that starts after ``seen`` images."""
        if seen < self.warmup:
            t = seen / self.warmup
            rise = math.sin(0.5 * math.pi * t) if self.ramp == "cosine" else t
            return self.pre_warmup + (self.initial - self.pre_warmup) * rise
        if self.final == self.initial:
            return self.initial
        t = min(max((seen - self.warmup) / max(self.decay - self.warmup, 1), 0.0), 1.0)
        return math.exp(math.log(self.initial) * (1 - t) + math.log(self.final) * t)


def learning_rate(group: str, optimizer: object, scheduler: object | None, timeline: Timeline) -> LearningRate:
    """Turns nerfstudio's optimizer and scheduler configurations of one parameter group into a ``LearningRate``.

    Raises:
        ValueError: for a scheduler that is not an exponential decay, or a decay to or from zero.
    """
    initial = float(optimizer.lr)  # type: ignore[attr-defined]
    if scheduler is None:
        return LearningRate(initial, initial)
    if not all(hasattr(scheduler, name) for name in ("lr_final", "max_steps", "warmup_steps", "lr_pre_warmup")):
        raise ValueError(
            f"optimizers.{group}.scheduler is a {type(scheduler).__name__}; bytesplat schedules count images and "
            "support ExponentialDecaySchedulerConfig or None."
        )
    final = initial if scheduler.lr_final is None else float(scheduler.lr_final)
    if min(initial, final) <= 0 and initial != final:
        raise ValueError(f"optimizers.{group}: an exponential decay needs positive rates, found {initial} to {final}.")
    return LearningRate(
        initial,
        final,
        decay=timeline.images(scheduler.max_steps),
        warmup=timeline.images(scheduler.warmup_steps, at_least=0),
        pre_warmup=float(scheduler.lr_pre_warmup),
        ramp=str(getattr(scheduler, "ramp", "cosine")),
    )


@dataclass(frozen=True)
class RoundScale:
    """How one dense-Adam step on a round of B views is made worth B steps on one view each.

    Adam moves a parameter by its rate times the mean of the gradients over the root of the mean of their squares. If
    both means are taken over *views*, however many of them a step has, that quotient is the one of single views, and
    what remains is ``lr * B``, and ``beta ** B`` for the same memory in images.

    The square of a round's *sum* is another matter: by how much it differs from the sum of the squares depends on how
    many views show a Gaussian and how far their gradients agree. A rate can make up for that on average only: sqrt(B)
    times as large where one view of a round at most has a gradient, or all have independent ones (Malladi et al., "On
    the SDEs and scaling rules for adaptive gradient algorithms", 2022), and B times where all have the same.
    """

    views: int

    def learning_rate(self, rate: float) -> float:
        return rate * self.views

    def betas(self, *betas: float) -> tuple[float, ...]:
        return tuple(beta**self.views for beta in betas)
