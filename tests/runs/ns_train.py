"""The words of a run of ``ns-train``, and what it leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.0005)  # writing a checkpoint takes some milliseconds, and tests want to be there in time


@dataclass(frozen=True)
class Run:
    """An ``ns-train`` on the CPU."""

    data: Path
    output: Path

    @property
    def folder(self) -> Path:
        return self.output / "scene/bytesplat/run"

    @property
    def models(self) -> Path:
        return self.folder / "nerfstudio_models"

    def words(self, *options: object, steps: int) -> list[str]:
        fixed = {
            "--data": self.data,
            "--output-dir": self.output,
            "--experiment-name": "scene",
            "--timestamp": "run",
            "--machine.device-type": "cpu",
            "--max-num-iterations": steps,
            "--logging.steps-per-log": 1,
            "--pipeline.model.max-gaussians": 1500,
        }
        words = [str(word) for option in fixed.items() for word in option]
        vis = [] if "--vis" in options else ["--vis", "tensorboard"]
        split = ["nerfstudio-data", "--eval-mode", "interval", "--eval-interval", "4"]
        return ["bytesplat", *words, *vis, *map(str, options), *split]

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # one may be under way

    def wait_for_steps(self, count: int) -> None:
        """Returns once so many more steps have been reported."""
        before = len(self.metrics())
        wait_until(lambda: len(self.metrics()) >= before + count, "step")

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints that are there; those that are not whole fail here."""
        return sorted(torch.load(path, weights_only=True)["step"] for path in self.models.glob("step-*.ckpt"))

    def checkpoint(self, step: int) -> dict[str, Any]:
        return torch.load(self.models / f"step-{step:09d}.ckpt", weights_only=True)
