"""Seconds and sizes of ``bytesplat-export`` for a checkpoint of random Gaussians with harmonics of degree 3.

    python benchmarks/export.py [millions of Gaussians]

What is timed is the whole command but for Python's start: reading the checkpoint, leaving out, moving, writing. Random
harmonics do not compress; those of real scenes do, so real SPZ files are smaller.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from bytesplat_ns.export.command import main
from bytesplat_ns.ops.layout import Gaussians

CONFIG = "relative_model_dir: [nerfstudio_models]\npipeline: {model: {rasterize_mode: classic}}\n"


def make_run(folder: Path, count: int) -> Path:
    """A run with one checkpoint; returns its ``config.yml``."""
    widths = {"means": (3,), "quats": (4,), "scales": (3,), "opacities": (1,), "features_dc": (3,)}
    widths["features_rest"] = (15, 3)
    parameters = {name: torch.randn(count, *widths[name]) for name in Gaussians.PARAMETERS}
    parameters["features_rest"] *= 0.1
    parameters["scales"] -= 5
    (folder / "nerfstudio_models").mkdir()
    state = {"bytesplat": {}, "pipeline": {f"_model.gauss_params.{name}": p for name, p in parameters.items()}}
    torch.save(state, folder / "nerfstudio_models/step-000029999.ckpt")
    transform = {"transform": [[0, -1, 0, 1], [0.6, 0, 0.8, 2], [-0.8, 0, 0.6, 3]], "scale": 0.3}
    (folder / "dataparser_transforms.json").write_text(json.dumps(transform))
    (folder / "config.yml").write_text(CONFIG)
    return folder / "config.yml"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        config = make_run(Path(name), int(float(sys.argv[1] if len(sys.argv) > 1 else 3) * 1e6))
        for output in ("splat.ply", "splat.spz"):
            for frame in ("training", "original"):
                main(["--load-config", str(config), "--output", str(Path(name) / output), "--frame", frame])
