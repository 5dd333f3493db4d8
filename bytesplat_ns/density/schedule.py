"""When Gaussians are refined and when their opacities are reset, counted in images seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DensitySchedule:
    """Spans and moments in images seen, so that rounds of any size follow the same course.

    The defaults are those of splatfacto for a run of 30,000 images. A round takes the count from ``before``
    to ``after``; what is due at a moment m happens after the round with before < m <= after.
    """

    start: int = 500
    """refinement begins after it"""
    stop: int = 15_000
    """refinement and opacity resets end before it"""
    every: int = 100
    """from one refinement to the next"""
    reset_every: int | None = 3_000
    """from one opacity reset to the next; None: never"""
    pause_after_reset: int = 0
    """no refinement that soon after a reset: opacities say little until each image has been seen again"""
    stop_screen_size: int = 4_000
    """until then, what is large on the screen is split or pruned too"""
    total: int = 30_000
    """images of the whole run"""

    def __post_init__(self) -> None:
        if self.every < 1 or (self.reset_every is not None and self.reset_every < 1):
            raise ValueError(
                f"Periods must be positive: refine every {self.every}, reset every {self.reset_every} images."
            )
        if self.reset_every is not None and self.pause_after_reset >= self.reset_every:
            raise ValueError(
                f"Opacities are reset every {self.reset_every} images and refinement pauses for "
                f"{self.pause_after_reset} images after each reset, so that it would never happen: raise "
                "reset_alpha_every or shorten the pause."
            )

    def observes(self, seen: int) -> bool:
        """Whether statistics of the next round are of any use."""
        return seen < self.stop

    def refines_at(self, before: int, after: int) -> bool:
        """Whether a refinement is due after this round."""
        return any(
            self.start < moment < self.stop and moment - self._last_reset(moment) >= self.pause_after_reset
            for moment in multiples(self.every, before, after)
        )

    def resets_at(self, before: int, after: int) -> bool:
        """Whether an opacity reset is due after this round."""
        if self.reset_every is None:
            return False
        return any(self._resets(moment) for moment in multiples(self.reset_every, before, after))

    def uses_screen_size(self, seen: int) -> bool:
        """Whether the size on the screen counts in a refinement now."""
        return seen < self.stop_screen_size

    def prunes_size(self, seen: int) -> bool:
        """Whether large Gaussians are pruned: once the first reset has shown which of them are needed."""
        return self.reset_every is not None and seen > self.reset_every

    def _resets(self, moment: int) -> bool:
        assert self.reset_every is not None, "asked about multiples of a period only"
        # A run must not end on faded Gaussians: it has the pause and the span between two resets to recover.
        recovered = moment + self.pause_after_reset + self.reset_every
        return 0 < moment < self.stop and recovered <= self.total

    def _last_reset(self, seen: int) -> int:
        """The last reset up to ``seen``, or 0: a run begins as after a reset."""
        if self.reset_every is None:
            return 0
        resets = range(seen - seen % self.reset_every, 0, -self.reset_every)
        return next((moment for moment in resets if self._resets(moment)), 0)


def multiples(period: int, before: int, after: int) -> range:
    """Multiples of the period in (before, after]."""
    return range((before // period + 1) * period, after + 1, period)
