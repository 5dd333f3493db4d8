"""Runs nerfstudio's commands: as processes of their own, as a user does, or in this process to save their imports.

Nerfstudio takes many seconds to import, hence only inside functions, and few commands get a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STEPS = 100
"""Length of the runs that are compared with each other."""

SAVE_EVERY = 40
"""Steps between the checkpoints of the longest of them."""


@dataclass(frozen=True)
class Run:
    """What an ``ns-train`` leaves."""

    folder: Path
    printed: str = ""

    @property
    def config(self) -> Path:
        return self.folder / "config.yml"

    @property
    def models(self) -> Path:
        return self.folder / "nerfstudio_models"

    def checkpoint(self, step: int) -> dict[str, Any]:
        """The checkpoint after step number ``step`` (from zero), through the loader that refuses code."""
        return torch.load(self.models / f"step-{step:09d}.ckpt", weights_only=True)

    def metrics(self) -> list[dict[str, Any]]:
        text = (self.folder / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # one may be under way


def arguments(
    data: Path, output: Path, *options: str, steps: int, method: str = "bytesplat", device: str = "cpu"
) -> list[str]:
    """Arguments of ``ns-train`` for a run that leaves ``Run(output / "scene" / method / "run")``."""
    fixed = {
        "--data": data,
        "--output-dir": output,
        "--experiment-name": "scene",
        "--timestamp": "run",
        "--machine.device-type": device,
        "--max-num-iterations": steps,
        "--logging.steps-per-log": 1,
        "--pipeline.model.max-gaussians": 3000,  # twice the points of the capture
    }
    words = [str(word) for option in fixed.items() for word in option]
    vis = [] if "--vis" in options else ["--vis", "tensorboard"]
    split = ["--eval-mode", "interval", "--eval-interval", "4"]
    return [method, *words, *vis, *options, "nerfstudio-data", *split]


def train(data: Path, output: Path, *options: str, steps: int, method: str = "bytesplat", device: str = "cpu") -> Run:
    """``ns-train`` in this process, through its own parser."""
    from nerfstudio.scripts import train
    from nerfstudio.utils import writer

    try:
        train.main(parse(*arguments(data, output, *options, steps=steps, method=method, device=device)))
    finally:  # nerfstudio expects one run a process
        for state in (writer.EVENT_WRITERS, writer.EVENT_STORAGE, writer.GLOBAL_BUFFER):
            state.clear()
    return Run(output / "scene" / method / "run")


def parse(*words: str) -> Any:
    """The configuration that ``ns-train`` makes of its arguments."""
    import tyro
    from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion

    return tyro.cli(AnnotatedBaseConfigUnion, args=list(words))


def export(what: str, run: Run, output: Path, *options: str) -> Path:
    """``ns-export`` in this process; returns the folder ``output``."""
    import tyro
    from nerfstudio.scripts import exporter

    words = "--load-config", run.config, "--output-dir", output, *options
    tyro.cli(exporter.Commands, args=[what, *map(str, words)]).main()
    return output


def render(what: str, run: Run, output: Path, *options: str | Path) -> Path:
    """``ns-render`` to PNG images in this process; returns the folder ``output``."""
    import tyro
    from nerfstudio.scripts import render

    words = "--load-config", run.config, "--output-path", output, "--image-format", "png", *options
    tyro.cli(render.Commands, args=[what, *map(str, words)]).main()
    return output


class Terminal:
    """Starts installed commands where there is no GPU and no other machine can be reached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._network = folder / "network.log"
        path = [str(Path(__file__).parent / "offline"), os.environ.get("PYTHONPATH", "")]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "NETWORK_LOG": str(self._network),
            "TORCH_HOME": str(folder / "torch"),  # where LPIPS would find its weights
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # unlike in this process: results must not depend on it
        }
        self._started = 0

    def start(self, command: str, *words: str | Path) -> Process:
        """Starts a command that was installed with this interpreter."""
        self._started += 1
        log = self._folder / f"{self._started}-{command}.log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                [Path(sys.executable).parent / command, *words],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Process(process, log, self._network)

    def run(self, command: str, *words: str | Path) -> str:
        """Runs a command to its end and returns what it printed."""
        with self.start(command, *words) as process:
            return process.finish()


class Process:
    """A command that runs; killed at the end of its ``with`` block if it still does."""

    def __init__(self, process: subprocess.Popen, log: Path, network: Path) -> None:
        self._process, self._log, self._network = process, log, network

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, seconds: float) -> int:
        """Waits for its end; its exit code."""
        return self._process.wait(seconds)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def finish(self, seconds: float = 240) -> str:
        """Waits for a successful end without any use of the network, and returns what was printed."""
        code = self._process.wait(seconds)
        assert code == 0, f"{self._process.args} ended with {code}:\n{self.output}"
        assert not self._network.exists(), self._network.read_text()
        return self.output
