"""Whole training runs through nerfstudio's own commands: this method and stock splatfacto on the same photos.

    python benchmarks/train.py --data DATA [--steps N] [--methods bytesplat splatfacto] [--seeds 42 43 44]
        [--without-lpips] [-- OPTIONS]

Every 8th photo is held out. Each method trains once a seed (``ns-train``), then is evaluated (``ns-eval``). What is
printed, and kept as JSON in ``benchmarks/results``: wall time of the training process, steps a second, quality on the
held-out photos, the number of Gaussians, and the peak of GPU memory, also divided by the number of Gaussians at the end
and by that of a photo's pixels. Options behind ``--`` go to ``ns-train`` of our methods only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import ROOT, provenance

SPLIT = ["nerfstudio-data", "--eval-mode", "interval", "--eval-interval", "8", "--downscale-factor", "1"]
OURS = "bytesplat"
"""What the names of our methods begin with."""


def call(script: str, without_lpips: bool, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs a nerfstudio script; returns its wall seconds and what ``script.py`` reports.

    Raises:
        SystemExit: the command failed; the end of its output is shown.
    """
    report = folder / f"{script}.json"
    options = ["--without-lpips"] if without_lpips else []
    command = [sys.executable, str(Path(__file__).with_name("script.py")), str(report), script, *options, *arguments]
    environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # stock checkpoints hold numpy scalars
    start = time.monotonic()
    with open(folder / f"{script}.log", "w+") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, env=environment)
        seconds = time.monotonic() - start
        log.seek(0)
        if done.returncode:
            raise SystemExit(f"{script} {' '.join(arguments)} failed ({done.returncode}):\n{log.read()[-3000:]}")
    return {"seconds": seconds, **json.loads(report.read_text())}


def train_arguments(method: str, data: Path, steps: int, seed: int, extra: Sequence[str], folder: Path) -> list[str]:
    """Arguments of ``ns-train``: the same for both sides but for the options of ours."""
    never = "1000000"
    fixed = {
        "--data": data,
        "--max-num-iterations": steps,
        "--machine.device-type": "cuda" if torch.cuda.is_available() else "cpu",
        "--machine.seed": seed,
        "--pipeline.datamanager.train-cameras-sampling-seed": seed,
        "--output-dir": folder,
        "--experiment-name": "x",
        "--timestamp": "t",
        "--vis": "tensorboard",
        "--steps-per-eval-image": never,
        "--steps-per-eval-all-images": never,
        "--steps-per-save": 10_000,
        "--viewer.quit-on-train-completion": True,
    }
    words = [str(word) for option in fixed.items() for word in option]
    return [method, *words, *(extra if method.startswith(OURS) else ()), *SPLIT]


def measure(
    method: str, data: Path, steps: int, seed: int, without_lpips: bool, extra: Sequence[str], folder: Path
) -> dict[str, Any]:
    """One run, trained and evaluated."""
    folder.mkdir()
    trained = call("train", without_lpips, train_arguments(method, data, steps, seed, extra, folder), folder)
    run, metrics = folder / "x" / method / "t", folder / "metrics.json"
    call("eval", without_lpips, ["--load-config", f"{run}/config.yml", "--output-path", f"{metrics}"], folder)
    results = json.loads(metrics.read_text())["results"]
    (checkpoint,) = (run / "nerfstudio_models").glob("*.ckpt")
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)["pipeline"]
    return row(method, seed, trained, results, len(state["_model.gauss_params.means"]))


def row(method: str, seed: int, trained: dict[str, Any], results: dict[str, float], gaussians: int) -> dict[str, Any]:
    """What is kept of a run."""
    peak, speed = trained["peak_gpu_bytes"], trained["steps_per_second"]
    return {
        "method": method,
        "seed": seed,
        "train_seconds": round(trained["seconds"], 1),
        "steps_per_second": speed and round(speed, 1),
        "psnr": results["psnr"],
        "ssim": results["ssim"],
        "gaussians": gaussians,
        "peak_gpu_bytes": peak,
        "peak_bytes_per_gaussian": peak and round(peak / gaussians),
        "peak_bytes_per_pixel": peak and round(peak / trained["pixels"]),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and standard deviation over seeds of each number, by method."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        ours = [row for row in rows if row["method"] == method]
        names = [k for k in ours[0] if k not in ("method", "seed") and all(row[k] is not None for row in ours)]
        values = {name: [row[name] for row in ours] for name in names}
        found[method] = {
            name: {"mean": statistics.mean(of), "deviation": statistics.stdev(of) if len(of) > 1 else 0.0}
            for name, of in values.items()
        }
    return found


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--methods", nargs="+", default=["bytesplat", "splatfacto"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--without-lpips", action="store_true", help="leave out LPIPS, whose weights are a download")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("extra", nargs="*", help="options of ns-train for our methods")
    found = parser.parse_args(words)
    if not (found.data / "transforms.json").is_file():
        parser.error(f"{found.data} has no transforms.json: --data is a folder that nerfstudio-data reads")
    found.data = found.data.resolve()
    return found


def main() -> None:
    asked = options()
    asked.output.mkdir(parents=True, exist_ok=True)
    result = {**provenance(), "data": asked.data.name, "steps": asked.steps}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in asked.seeds:
            for method in asked.methods:
                own = Path(folder) / f"{method} {seed}"
                rows.append(measure(method, asked.data, asked.steps, seed, asked.without_lpips, asked.extra, own))
                print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
                result |= {"methods": rows, "summary": summary(rows)}  # kept after each run
                (asked.output / f"train_{asked.data.name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
