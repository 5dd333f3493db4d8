"""What ranks tell each other, how long they wait, and how evenly work is spread, for the log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bytesplat_ns.parallel.ranks import Ranks


class Traffic:
    """Reads the counters of ``Ranks`` at log intervals; between them nothing is measured but what is sent."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._seconds = 0.0
        self._begin(0, 0)

    def _begin(self, step: int, images: int) -> None:
        self._step, self._images = step, images
        self._sent, self._rows, self._zero = Counter(self._ranks.sent), self._ranks.rows, self._ranks.zero_rows

    def start(self, step: int, images: int) -> None:
        """Counting begins after so many steps and images."""
        self._begin(step, images)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around the one step of which waiting and transfers are timed. On a GPU that step waits for the device."""
        ranks = self._ranks
        ranks.waited = ranks.transferred = 0.0
        start = time.perf_counter()
        with ranks.timed():
            yield
        self._seconds = time.perf_counter() - start

    def read(self, step: int, images: int, gaussians: int, records: int) -> dict[str, float]:
        """What happened since the last time, summed up over all ranks, which call this together. Empty on one rank.

        Args:
            step, images: steps and images done by now.
            gaussians, records: of this rank, the latter in the last step.
        """
        ranks = self._ranks
        if ranks.size == 1:
            return {}
        kinds = sorted(ranks.sent)  # the same on all ranks, which take part in the same collectives
        sent = [ranks.sent[kind] - self._sent[kind] for kind in kinds]
        rows, zero = ranks.rows - self._rows, ranks.zero_rows - self._zero
        own = [gaussians, records, ranks.waited, ranks.transferred, self._seconds, rows, zero, *sent]
        table = ranks.gather(torch.tensor([own], dtype=torch.float64, device=ranks.device)).cpu()
        total, steps = table.sum(0).tolist(), max(step - self._step, 1)
        _, _, waited, transferred, seconds, rows, zero, *sent = total
        values = {
            "views": (images - self._images) / steps,
            "idle_share": waited / max(seconds, 1e-9),
            "transfer_share": transferred / max(seconds, 1e-9),
            "imbalance_gaussians": _imbalance(table[:, 0]),
            "imbalance_records": _imbalance(table[:, 1]),
            "zero_rows": zero / max(rows, 1),
        }
        values |= {f"sent_{kind}": count / steps for kind, count in zip(kinds, sent, strict=True)}
        self._begin(step, images)
        return values


def _imbalance(load: torch.Tensor) -> float:
    """The largest part over the mean."""
    mean = float(load.mean())
    return float(load.max()) / mean if mean > 0 else 1.0


def summary(values: dict[str, float]) -> str:
    """One line of what ``Traffic.read`` found."""
    kinds = {name.removeprefix("sent_"): count for name, count in values.items() if name.startswith("sent_")}
    sent = ", ".join(f"{kind} {count / 1e6:.3g}" for kind, count in kinds.items() if count > 0)
    return (
        f"ranks: {values['views']:.3g} views a step, {values['idle_share']:.0%} idle, "
        f"{values['transfer_share']:.0%} transferring, largest share {values['imbalance_gaussians']:.2f} (Gaussians) "
        f"and {values['imbalance_records']:.2f} (records) of the mean; MB a step: {sent}; "
        f"{values['zero_rows']:.0%} of gradient rows zero"
    )
