"""The entry functions of ``ns-train``, ``ns-eval`` and ``ns-export``, called as the installed commands call them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STEPS = 4


@dataclass(frozen=True)
class Run:
    """What ``ns-train`` leaves."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yml"

    def steps(self) -> list[dict[str, Any]]:
        """One entry a step."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "loss" in line]

    def means(self) -> torch.Tensor:
        """[N, 3] of the last checkpoint."""
        (path,) = (self.folder / "nerfstudio_models").glob("*.ckpt")
        return torch.load(path, weights_only=True)["pipeline"]["_model.gauss_params.means"]


@contextmanager
def _command_line(command: str, *words: object) -> Iterator[None]:
    """Words on the command line, and nobody at the keyboard."""
    before = sys.argv, sys.stdin
    sys.argv, sys.stdin = [command, *map(str, words)], io.StringIO()
    try:
        yield
    finally:
        sys.argv, sys.stdin = before


def words(data: Path, output: Path, *last: str) -> list[str]:
    """Arguments of a short ``ns-train``; ``last`` are options of the method and then the data's format."""
    fixed = {
        "--data": data,
        "--output-dir": output,
        "--experiment-name": "scene",
        "--timestamp": "run",
        "--vis": "tensorboard",
        "--machine.device-type": "cpu",
        "--max-num-iterations": STEPS,
        "--logging.steps-per-log": 1,
        "--pipeline.model.max-gaussians": 300,
    }
    return ["bytesplat", *(str(word) for option in fixed.items() for word in option), *last]


def train(data: Path, output: Path, *last: str) -> Run:
    from nerfstudio.scripts import train
    from nerfstudio.utils import writer

    try:
        with _command_line("ns-train", *words(data, output, *last)):
            train.entrypoint()
    finally:  # nerfstudio expects one run a process
        for state in (writer.EVENT_WRITERS, writer.EVENT_STORAGE, writer.GLOBAL_BUFFER):
            state.clear()
    return Run(output / "scene/bytesplat/run")


def evaluate(run: Run) -> dict[str, float]:
    """``ns-eval``: mean metrics of the held-out photos."""
    from nerfstudio.scripts import eval

    file = run.folder / "metrics.json"
    with _command_line("ns-eval", "--load-config", run.config, "--output-path", file):
        eval.entrypoint()
    return json.loads(file.read_text())["results"]


def export(run: Run) -> int:
    """``ns-export gaussian-splat``: number of Gaussians in the PLY."""
    from nerfstudio.scripts import exporter

    with _command_line("ns-export", "gaussian-splat", "--load-config", run.config, "--output-dir", run.folder):
        exporter.entrypoint()
    header = (run.folder / "splat.ply").read_bytes().split(b"end_header")[0]
    return int(header.split(b"element vertex ")[1].split()[0])
