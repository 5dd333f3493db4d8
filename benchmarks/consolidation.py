"""Ranks that train a street together, with rounds of views that meet on few ranks and with rounds of any views.

    python benchmarks/consolidation.py [--ranks 4] [--images 1200] [--seeds 42 43] [--output results.json]

The street is long: cameras look across it, so that most see the cells of one or two ranks. Its photos are rendered by
our own rasterizer and written as a nerfstudio folder, on which ``ns-train bytesplat`` runs with
``--pipeline.datamanager.consolidate-views`` on and off in turn: the same machine, data and number of images. What is
told are means over the second half of a run: views a round, the share of their time for which ranks wait for each
other, bytes an image that they send, images a second; and quality on every 8th photo, which is held out.

On CPUs the ranks share the cores, so that a rank that waits leaves its core to others: times say little there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Picture
from provenance import provenance

from bytesplat_ns import ops
from bytesplat_ns.ops.layout import Cameras, Gaussians, RenderSettings
from bytesplat_ns.splats.ply import write_vertices
from bytesplat_ns.views import world_to_camera

LENGTH, WIDTH, HEIGHT = 60.0, 8.0, 5.0
"""Of the street between its two facades, metres."""

SIZE, FOCAL = (128, 96), 96.0  # pixels
SH_C0 = 0.28209479177387814


def street(count: int, seed: int = 0) -> Gaussians:
    """Facades and ground in coloured patches."""
    draw = torch.Generator().manual_seed(seed)
    along, across, up = (torch.rand(count, generator=draw) for _ in range(3))
    side = torch.randint(3, (count,), generator=draw)  # two facades and the ground
    x = (along - 0.5) * LENGTH
    y = torch.where(side == 2, (across - 0.5) * WIDTH, (side - 0.5) * WIDTH)
    z = torch.where(side == 2, torch.zeros(count), up * HEIGHT)
    patch = torch.stack([x // 0.7, (y + 20) // 0.9 + 100 * side, z // 0.8], dim=1)
    colour = 0.5 + 0.45 * torch.sin(
        patch @ torch.tensor([[12.99, 3.17, 7.71], [78.23, 5.91, 1.37], [37.72, 9.13, 4.11]])
    )
    size = 0.5 * (LENGTH * (2 * HEIGHT + WIDTH) / count) ** 0.5
    return Gaussians(
        means=torch.stack([x, y, z], dim=1),
        quats=torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(count, 1),
        scales=torch.full((count, 3), math.log(size)),
        opacities=torch.full((count, 1), 3.0),
        features_dc=(colour - 0.5) / SH_C0,
        features_rest=torch.zeros(count, 0, 3),
        ids=torch.arange(count),
    )


def poses(views: int) -> torch.Tensor:
    """[V, 3, 4] camera to world, OpenGL axes: along the street in both directions, looking at the facade opposite."""
    result = []
    for view in range(views):
        x = (view // 2 + 0.5) / math.ceil(views / 2) * LENGTH - LENGTH / 2
        facing = 1.0 if view % 2 else -1.0
        turn = 0.25 * math.sin(1.7 * view)
        back = np.array([math.sin(turn), -facing * math.cos(turn), 0.0])
        up = np.array([0.0, 0.0, 1.0])
        right = np.cross(up, back)
        result.append(np.stack([right, up, back, [x, -facing * WIDTH / 4, 1.8]], axis=1))
    return torch.tensor(np.array(result), dtype=torch.float32)


def write_capture(folder: Path, views: int) -> None:
    """A nerfstudio folder of the street."""
    scene, cameras = street(30_000), poses(views)
    (width, height), frames = SIZE, []
    (folder / "images").mkdir(parents=True)
    for view, pose in enumerate(cameras):
        camera = Cameras(
            viewmats=world_to_camera(pose[None]),
            intrinsics=torch.tensor([[FOCAL, FOCAL, width / 2, height / 2]]),
            sizes=torch.tensor([[width, height]], dtype=torch.int32),
            width=width,
            height=height,
        )
        image, _ = ops.render(scene, camera, RenderSettings(sh_degree=0))
        rgb = (image.rgb[0] + image.transmittance[0, ..., None]).clamp(0, 1)
        name = f"images/{view:04d}.png"
        Picture.fromarray((rgb * 255).round().byte().numpy()).save(folder / name)
        matrix = [*pose.tolist(), [0.0, 0.0, 0.0, 1.0]]
        frames.append({"file_path": name, "transform_matrix": matrix})
    points = scene.means[::10]
    colour = (scene.features_dc[::10] * SH_C0 + 0.5).clamp(0, 1) * 255
    cloud = {name: points[:, i].numpy() for i, name in enumerate("xyz")}
    cloud |= {name: colour[:, i].byte().numpy() for i, name in enumerate(("red", "green", "blue"))}
    write_vertices(folder / "sparse_pc.ply", len(points), cloud)
    intrinsics = {"fl_x": FOCAL, "fl_y": FOCAL, "cx": width / 2, "cy": height / 2, "w": width, "h": height}
    content = {"camera_model": "OPENCV", **intrinsics, "ply_file_path": "sparse_pc.ply", "frames": frames}
    (folder / "transforms.json").write_text(json.dumps(content))


def ns_train(words: dict[str, Any], ranks: int, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Trains on so many ranks, every 8th photo held out; the run's folder, and what its log says step by step."""
    fixed = {
        "--output-dir": folder,
        "--experiment-name": "x",
        "--timestamp": "t",
        "--machine.device-type": "cuda" if torch.cuda.is_available() else "cpu",
        "--machine.num-devices": ranks,
        "--logging.steps-per-log": 1,
        "--steps-per-save": 1_000_000,
        "--vis": "tensorboard",
        "--steps-per-eval-image": 1_000_000,
        "--steps-per-eval-all-images": 1_000_000,
        "--viewer.quit-on-train-completion": True,
    }
    split = ["nerfstudio-data", "--eval-mode", "interval", "--eval-interval", "8", "--downscale-factor", "1"]
    options = [str(word) for pair in (fixed | words).items() for word in pair]
    done = subprocess.run(["ns-train", "bytesplat", *options, *split], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ns-train {' '.join(options)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    run = folder / "x/bytesplat/t"
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(data: Path, consolidate: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run; what its log says."""
    words = {
        "--data": data,
        "--machine.seed": seed,
        "--pipeline.datamanager.train-cameras-sampling-seed": seed,
        "--pipeline.datamanager.consolidate-views": consolidate,
        "--pipeline.model.background-color": "white",
        "--pipeline.model.max-gaussians": options.max_gaussians,
        "--max-num-iterations": options.images,
    }
    _, entries = ns_train(words, options.ranks, folder)
    steps = [entry for entry in entries if "loss" in entry]
    evaluated = [entry for entry in entries if "eval_psnr" in entry]
    return summary(steps) | {"held_out_psnr": evaluated[-1]["eval_psnr"], "gaussians": steps[-1]["gaussians"]}


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Means over the second half of a run."""
    middle = next(i for i, step in enumerate(steps) if step["images"] >= steps[-1]["images"] / 2)
    half, (first, last) = steps[middle + 1 :], (steps[middle], steps[-1])
    images = last["images"] - first["images"]
    sent = sum(value for step in half for name, value in step.items() if name.startswith("sent_"))
    return {
        "views_per_round": images / len(half),
        "idle_share": statistics.mean(step["idle_share"] for step in half),
        "transfer_share": statistics.mean(step["transfer_share"] for step in half),
        "megabytes_per_image": sent / images / 1e6,
        "images_per_second": images / (last["seconds"] - first["seconds"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--views", type=int, default=160)
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--max-gaussians", type=int, default=12_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    origin, runs = provenance() | {"cores": os.cpu_count()}, []
    with tempfile.TemporaryDirectory() as name:
        write_capture(Path(name) / "data", options.views)
        for seed in options.seeds:
            for consolidate in ("on", "off"):
                run = train(Path(name) / "data", consolidate, seed, options, Path(name) / f"{consolidate}{seed}")
                runs.append({"consolidate": consolidate, "seed": seed, **run})
                print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in runs[-1].items()))
                sys.stdout.flush()
    if options.output:
        fixed = {"ranks": options.ranks, "views": options.views, "images": options.images}
        options.output.write_text(json.dumps(origin | fixed | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
