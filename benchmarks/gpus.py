"""Training on several GPUs: whole runs of ``ns-train bytesplat`` on one and on more, and what they tell each other.

    python benchmarks/gpus.py --data DATA [--gpus 1 2] [--views 1 2 4] [--images 3000] [--cap 200000] [--seed 42]
        [--output results.json]

Every 8th photo is held out. A run shows so many images, whatever the number of GPUs and of views in a round. Printed
are: wall time of the command; images a second over the second half of the run, taken from the time stamps of its log,
so that imports and compilation are left out; PSNR of the held-out photos at the end; the number of Gaussians; and of
several GPUs, over the same half, megabytes an image by kind, the share of its time for which a logged step waited and
sent, and the part of the gradient rows that were zero. A logged step is measured, and waits for its device, so few are.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

SPLIT = ["nerfstudio-data", "--eval-mode", "interval", "--eval-interval", "8", "--downscale-factor", "1"]
LINES = 30
"""Of the log of a run."""


def arguments(data: Path, gpus: int, views: int, options: argparse.Namespace, folder: Path) -> list[str]:
    """Of ``ns-train``."""
    fixed = {
        "--data": data,
        "--output-dir": folder,
        "--experiment-name": "x",
        "--timestamp": "t",
        "--machine.device-type": "cuda" if torch.cuda.is_available() else "cpu",
        "--machine.num-devices": gpus,
        "--machine.seed": options.seed,
        "--pipeline.datamanager.train-cameras-sampling-seed": options.seed,
        "--pipeline.datamanager.views-per-round": views,
        "--pipeline.model.max-gaussians": options.cap,
        "--max-num-iterations": options.images,
        "--logging.steps-per-log": max(options.images // views // LINES, 1),
        "--steps-per-save": 1_000_000,
        "--vis": "tensorboard",
        "--steps-per-eval-image": 1_000_000,
        "--steps-per-eval-all-images": 1_000_000,
        "--viewer.quit-on-train-completion": True,
    }
    return ["bytesplat", *(str(word) for pair in fixed.items() for word in pair), *SPLIT]


def run(gpus: int, views: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run.

    Raises:
        SystemExit: it failed, or took longer than it may; the end of what it printed is shown.
    """
    words = arguments(options.data, gpus, views, options, folder)
    command = [sys.executable, "-m", "nerfstudio.scripts.train", *words]
    log, begin = folder / "log", time.monotonic()
    with open(log, "w") as file:
        output = {"stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **output)
        try:
            code = process.wait(options.patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too, which may wait for each other for ever
            code = f"nothing after {options.patience} s"
    if code:
        raise SystemExit(f"{gpus} GPUs, {views} views: ended with {code}:\n{log.read_text()[-4000:]}")
    lines = [json.loads(line) for line in (folder / "x/bytesplat/t/metrics.jsonl").read_text().splitlines()]
    return {"gpus": gpus, "views": views, "wall_seconds": round(time.monotonic() - begin, 1), **summary(lines)}


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a log says of the second half of its run, and of the end."""
    steps = [line for line in lines if "loss" in line]
    (end,) = (line for line in lines if "eval_psnr" in line)
    middle = next(i for i, step in enumerate(steps) if step["images"] >= steps[-1]["images"] / 2)
    half, (first, last) = steps[middle + 1 :], (steps[middle], steps[-1])
    if not half:
        raise SystemExit(f"The log has {len(steps)} lines, too few to tell a speed: raise --images.")
    found = {
        "images_per_second": (last["images"] - first["images"]) / (last["seconds"] - first["seconds"]),
        "psnr": end["eval_psnr"],
        "ssim": end["eval_ssim"],
        "gaussians": last["gaussians"],
    }
    if "views" not in last:  # one rank
        return found
    names = ("idle_share", "transfer_share", "zero_rows", "imbalance_gaussians", "imbalance_records")
    found |= {name: statistics.mean(step[name] for step in half) for name in names}
    kinds = [name for name in last if name.startswith("sent_")]
    # Means over the steps from one line to the next, per step; these lines are of equal length.
    sent = {kind: statistics.mean(step.get(kind, 0.0) / step["views"] for step in half) / 1e6 for kind in kinds}
    return found | {f"megabytes_an_image_{kind.removeprefix('sent_')}": size for kind, size in sent.items() if size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--views", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--cap", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--patience", type=float, default=120, help="seconds that a run may take")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.data = options.data.resolve()
    fixed = {"data": options.data.name, "images": options.images, "cap": options.cap, "seed": options.seed}
    origin, runs = provenance() | {"cores": os.cpu_count()} | fixed, []
    for views in options.views:
        for gpus in options.gpus:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run(gpus, views, options, Path(folder)))
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in runs[-1].items()))
            sys.stdout.flush()
            if options.output:  # kept after each run
                options.output.write_text(json.dumps(origin | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
