"""Whether Adam moves the colours of Gaussians that no view shows in every step, or puts that off until one does.

Dense Adam reads and writes 1,416 bytes of every Gaussian in every step. Where Gaussians are and how large depends on
their geometry alone, which is therefore moved in every step. Their colours, four fifths of the bytes, influence nothing
while no view shows them: the steps that they miss go on record, and they are caught up with before they are looked at,
in registers (``csrc/cuda/catch_up.cu``). The outcome is that of dense Adam, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops import fused
from bytesplat_ns.ops.layout import COLOURS, AdamStep, Cameras, Gaussians, Lag, RenderSettings

Choice = Literal["auto", "on", "off"]

MOST_STEPS = 1024
"""Steps on record before all colours are caught up with: one pass over memory in so many steps."""

FEWEST_GAUSSIANS = 30_000_000
LARGEST_SHARE = 0.2
"""Where it pays: on a GPU, for at least so many Gaussians, of which an average round shows no larger share.

By counting bytes it should pay earlier: colours that are shown are read and written twice, to catch up and to step, 264
+ 52 + 2 x 1,152 x share bytes of a Gaussian against 1,416. On an H200 (benchmarks/results/city_deferred_h200.json) it
costs 8 % of the images a second at 10M, of which a view shows 26 %, breaks even at 30M (18 %) and gives 10 % at 100M
(15 %), where the median step takes 33 ms instead of 48: views from high up show half of all and pay for all of them."""

NEWS = 1.25
"""The number of Gaussians has changed enough to decide anew once it has by this factor."""


class Deferral:
    """Keeps the record of the steps that colours have missed, while they are put off.

    Whoever reads colours or their moments, but for views that ``catch_up`` was asked about, calls ``settle`` first. The
    store does so itself before rows are copied, replaced or saved.
    """

    def __init__(self, store: GaussianStore) -> None:
        self._store = store
        self._decided_for = 0  # Gaussians
        self.lag: Lag | None = None  # None: Adam is dense
        store.settle = self.settle

    # To defer or not ------------------------------------------------------------------------------------------------

    def consider(
        self, choice: Choice, views_per_round: int, look: Callable[[], Cameras], settings: RenderSettings
    ) -> str | None:
        """Decides, at first and whenever the number of Gaussians is another one, whether to defer.

        A step on a CPU is the rasterizer's: Adam stays dense there unless told otherwise.

        Args:
            look: views that are typical of those in training; asked for only if the decision depends on what they show.

        Returns:
            a line for the log if Adam is another one from now on.
        """
        count, before = len(self._store), self._decided_for
        if before and before / NEWS < count < before * NEWS:
            return None
        self._decided_for = max(count, 1)
        on, seen = choice == "on", ""
        if choice == "auto" and self._store.device.type == "cuda" and count >= FEWEST_GAUSSIANS:
            share = shown(self._store.gaussians(), look(), settings, views_per_round)
            on, seen = share <= LARGEST_SHARE, f", of which a round shows {share:.0%}"
        if on == (self.lag is not None):
            return None
        self.turn(on)
        if on:
            return f"{count:,} Gaussians{seen}: Adam moves colours when a view shows them, with the same outcome."
        return f"{count:,} Gaussians{seen}: Adam moves all colours in each step again."

    def turn(self, on: bool) -> None:
        """Starts or ends to defer."""
        self.settle()
        self.lag = fused.lag_of(len(self._store), MOST_STEPS, self._store.device) if on else None

    # While deferring ------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before a step: rows may have come or gone since the last one, and the record may be full."""
        if self.lag is None:
            return
        if len(self.lag.past) == MOST_STEPS:
            self.settle()
        if len(self.lag.caught_up) != len(self._store):
            assert not self.lag.past, "the store settles before rows come or go"
            self.turn(True)

    def catch_up(self, cameras: Cameras, settings: RenderSettings) -> None:
        """Brings the colours of at least those Gaussians to the present that these views show."""
        if self.lag is not None:
            fused.catch_up(self._store.gaussians(), self._moments(), self.lag, cameras, settings)

    def count(self, step: AdamStep) -> None:
        """The step has taken place."""
        if self.lag is not None:
            self.lag.past.append(step)

    def settle(self) -> None:
        """Brings all colours to the present, and begins a new record."""
        if self.lag is not None and self.lag.past:
            fused.catch_up(self._store.gaussians(), self._moments(), self.lag, None, RenderSettings())
            self.lag.clear()

    def tables(self) -> list[Tensor]:
        """What the kernels of a step read and write beside the store's tables."""
        tables = () if self.lag is None else (self.lag.caught_up, self.lag.record, self.lag.fastest, self.lag.recorded)
        return [table for table in tables if table is not None]

    def _moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        columns = self._store.columns
        return {name: (columns[f"{name}.exp_avg"], columns[f"{name}.exp_avg_sq"]) for name in COLOURS}


def shown(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings, views_per_round: int) -> float:
    """Share of the Gaussians that an average round shows, if its views are drawn from these independently."""
    records = [len(ops.project(gaussians, cameras.view(view), settings)) for view in range(len(cameras))]
    share = sum(records) / (len(records) * len(gaussians))
    return 1 - (1 - share) ** views_per_round
