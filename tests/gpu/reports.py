"""What runs report of themselves."""

from __future__ import annotations

from commands import Run


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.metrics() if "loss" in line]


def quality(run: Run) -> float:
    """PSNR of the held-out photos after the last step, dB."""
    (held_out,) = (line for line in run.metrics() if "eval_psnr" in line)
    return held_out["eval_psnr"]


def gaussians(run: Run) -> int:
    return [line["gaussians"] for line in run.metrics() if "gaussians" in line][-1]
