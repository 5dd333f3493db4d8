"""Whole training runs through nerfstudio's own commands: this method and stock splatfacto on the same photos.

    python benchmarks/train.py --data DATA [--steps N] [--methods bytesplat splatfacto] [--without-lpips] [-- OPTIONS]

Every 8th photo is held out. Each method trains (``ns-train``), then is evaluated (``ns-eval``). The wall time of the
training process, its peak GPU memory, quality on the held-out photos and the number of Gaussians are printed, and kept
as JSON in ``benchmarks/results``. Options behind ``--`` go to ``ns-train bytesplat`` only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SPLIT = ["nerfstudio-data", "--eval-mode", "interval", "--eval-interval", "8", "--downscale-factor", "1"]

COMMAND = """
import json, sys, torch
script, without_lpips = sys.argv.pop(1), sys.argv.pop(1) == "True"
if without_lpips:  # stock splatfacto downloads LPIPS weights before it trains
    import torchmetrics.image.lpip
    class Left(torch.nn.Module):
        def __init__(self, **kwargs): super().__init__()
        def forward(self, *images): return torch.tensor(float("nan"))
    torchmetrics.image.lpip.LearnedPerceptualImagePatchSimilarity = Left

from importlib import import_module
import_module("nerfstudio.scripts." + script).entrypoint()
if torch.cuda.is_available():
    print("peak-gpu-bytes", torch.cuda.max_memory_allocated())
"""


def call(script: str, without_lpips: bool, arguments: list[str], log: Path) -> tuple[float, int | None]:
    """Runs a nerfstudio script; returns its wall seconds and peak GPU bytes.

    Raises:
        SystemExit: the command failed; the end of its output is shown.
    """
    start = time.monotonic()
    command = [sys.executable, "-c", COMMAND, script, str(without_lpips), *arguments]
    environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # stock checkpoints hold numpy scalars
    pipe = subprocess.PIPE
    done = subprocess.run(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False, env=environment)
    seconds = time.monotonic() - start
    log.write_text(done.stdout)
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed ({done.returncode}):\n{done.stdout[-3000:]}")
    peak = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak-gpu-bytes")]
    return seconds, peak[0] if peak else None


def measure(method: str, data: Path, steps: int, without_lpips: bool, extra: list[str], folder: Path) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = [method, "--data", str(data), "--max-num-iterations", str(steps), "--machine.device-type", device]
    arguments += ["--output-dir", str(folder), "--experiment-name", "x", "--timestamp", "t", "--vis", "tensorboard"]
    never = "1000000"
    arguments += ["--steps-per-eval-image", never, "--steps-per-eval-all-images", never, "--steps-per-save", "10000"]
    arguments += extra if method != "splatfacto" else ["--viewer.quit-on-train-completion", "True"]
    seconds, peak = call("train", without_lpips, [*arguments, *SPLIT], folder / f"{method}.log")
    run, metrics = folder / "x" / method / "t", folder / f"{method}.json"
    call("eval", without_lpips, ["--load-config", f"{run}/config.yml", "--output-path", f"{metrics}"], folder / "e.log")
    results = json.loads(metrics.read_text())["results"]
    (checkpoint,) = (run / "nerfstudio_models").glob("*.ckpt")
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)["pipeline"]
    return {
        "method": method,
        "train_seconds": round(seconds, 1),
        "psnr": results["psnr"],
        "ssim": results["ssim"],
        "gaussians": len(state["_model.gauss_params.means"]),
        "peak_gpu_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--methods", nargs="+", default=["bytesplat", "splatfacto"])
    parser.add_argument("--without-lpips", action="store_true", help="leave out LPIPS, whose weights are a download")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("extra", nargs="*", help="options of ns-train bytesplat")
    options = parser.parse_args()
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=False)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in options.methods:
            row = measure(method, options.data, options.steps, options.without_lpips, options.extra, Path(folder))
            rows.append(row)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    result = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "benchmarks/train.py", *sys.argv[1:]]),
        "data": options.data.name,
        "steps": options.steps,
        "methods": rows,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"train_{options.data.name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
