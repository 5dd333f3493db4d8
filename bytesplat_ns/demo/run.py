"""The whole way from photos to a splat: capture, ``ns-train bytesplat``, evaluation, export, pictures."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from bytesplat_ns.demo.capture import Capture, write_capture

TAIL = 20
"""Lines of a failed command's output that are shown again."""


class StepFailed(Exception):
    """A command of the demo ended with an error; the message holds its exit code and last lines."""


@dataclass(frozen=True)
class Run:
    """Photograph a ray-traced scene, train on it, evaluate, export and draw the result."""

    output: Path = Path("demo_output")
    """Folder for the capture, the run, the splat and the pictures."""
    steps: int = 2500
    """Training steps."""
    capture: Capture = field(default_factory=Capture)


def call(command: list[str]) -> None:
    """Runs a command and passes its output on.

    Raises:
        StepFailed: it did not exit with 0.
    """
    print(f"$ {shlex.join(command)}", flush=True)
    tail: deque[str] = deque(maxlen=TAIL)
    # Lines as they come, not in blocks; and threads that sleep while they wait: on cores that other programs use too,
    # spinning ones made training several times slower.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    with process:
        for line in process.stdout:
            print(line, end="", flush=True)
            tail.append(line)
    if process.returncode != 0:
        last = "".join(tail)
        raise StepFailed(f"{command[0]} ended with exit code {process.returncode}. Its last lines:\n{last}")


def find_command(name: str) -> str:
    """Path of a command of this Python environment, whether or not the environment is activated.

    Raises:
        StepFailed: there is none.
    """
    path = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if path is None:
        raise StepFailed(f"{name} was not found beside {sys.executable}: install nerfstudio into this environment.")
    return path


def train(data: Path, runs: Path, steps: int) -> Path:
    """Trains on the capture `data` with the stock command; returns the run's folder under `runs`."""
    import torch

    name, stamp = "demo", datetime.now().strftime("%Y-%m-%d_%H%M%S")
    command = [find_command("ns-train"), "bytesplat", "--data", str(data), "--max-num-iterations", str(steps)]
    command += ["--output-dir", str(runs), "--experiment-name", name, "--timestamp", stamp, "--vis", "tensorboard"]
    command += ["--steps-per-eval-all-images", str(max(1, steps // 8))]
    command += ["--machine.device-type", "cuda" if torch.cuda.is_available() else "cpu"]
    command += ["nerfstudio-data", "--eval-mode", "interval", "--eval-interval", "8"]
    call(command)
    return runs / name / "bytesplat" / stamp


def evaluate_and_export(folder: Path, output: Path) -> tuple[dict[str, float], int]:
    """Metrics over the held-out photos and the number of exported Gaussians.

    Calls what ``ns-eval`` and ``ns-export gaussian-splat`` call, in this process: nerfstudio takes longer to import
    than to do either. Leaves ``metrics.json``, ``comparisons/`` (photo and rendering side by side) and ``splat.ply``.
    """
    from nerfstudio.scripts.eval import ComputePSNR
    from nerfstudio.scripts.exporter import ExportGaussianSplat

    from bytesplat_ns.splats.ply import read_vertices

    config = folder / "config.yml"
    shutil.rmtree(output / "comparisons", ignore_errors=True)  # an earlier run may have held out more photos
    ComputePSNR(config, output / "metrics.json", render_output_path=output / "comparisons").main()
    ExportGaussianSplat(config, output, output_filename="splat.ply").main()
    metrics = json.loads((output / "metrics.json").read_text())["results"]
    return metrics, len(read_vertices(output / "splat.ply")["x"])


def run(config: Run) -> None:
    """The demo; the last line that it prints sums it up.

    Raises:
        StepFailed: training failed.
    """
    start = time.monotonic()
    output = config.output.resolve()
    data = output / "capture"
    print(f"Photographing {config.capture.views} views of a ray-traced scene into {data}", flush=True)
    write_capture(data, config.capture)
    folder = train(data, output / "runs", config.steps)
    metrics, gaussians = evaluate_and_export(folder, output)

    from bytesplat_ns.demo.report import draw_curve, draw_picture, read_comparison, typical

    picture = output / "picture.png"
    draw_picture(*read_comparison(typical(sorted((output / "comparisons").glob("*.png")))), picture)
    draw_curve(folder / "metrics.jsonl", output / "curve.png")
    print(
        f"demo: psnr={metrics['psnr']:.2f} ssim={metrics['ssim']:.4f} gaussians={gaussians} "
        f"seconds={time.monotonic() - start:.0f} ply={output / 'splat.ply'} picture={picture}",
        flush=True,
    )
