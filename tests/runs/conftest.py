"""A small capture, and a server that starts runs of ``ns-train`` on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer

from bytesplat_ns.demo.capture import Capture, write_capture


@dataclass(frozen=True)
class Run:
    """The words of an ``ns-train`` on the CPU, and the folder of what it leaves."""

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

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints that are there; those that are not whole fail here."""
        return sorted(torch.load(path, weights_only=True)["step"] for path in self.models.glob("step-*.ckpt"))

    def checkpoint(self, step: int) -> dict[str, Any]:
        return torch.load(self.models / f"step-{step:09d}.ckpt", weights_only=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("children")) as server:
        yield server


@pytest.fixture(scope="session")
def small_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nerfstudio folder of 8 photos; 0 and 4 are held out. Its name has a space."""
    folder = tmp_path_factory.mktemp("small capture")
    write_capture(folder, Capture(views=8, width=64, height=48, supersample=1, points=700, workers=1))
    return folder


@pytest.fixture
def run(small_capture: Path, tmp_path: Path) -> Run:
    return Run(small_capture, tmp_path / "my runs")
