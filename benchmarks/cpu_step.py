"""Times one training step on the CPU, stage by stage: 20,000 Gaussians, harmonics of degree 3, one view of 180 x 320.

    python benchmarks/cpu_step.py

The scene is fox_tiny (its point cloud densified to 20,000 points, its cameras and photos) if BYTESPLAT_TEST_DATA or
../shared/data beside the checkout has it, else a synthetic ball of points. Steps really train, a view each, from the
state that a run starts in. The same steps by the torch reference are timed for comparison. Results are printed and
written to benchmarks/results/cpu_step.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image as Photo
from provenance import cpu_model, provenance
from torch import Tensor

from bytesplat_ns.ops import cpu, cpu_library, reference
from bytesplat_ns.ops.layout import Cameras, Gaussians, RenderSettings
from bytesplat_ns.splats.initialization import from_points
from bytesplat_ns.splats.ply import read_vertices

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "cpu_step.json"
WIDTH, HEIGHT = 180, 320  # pixels
GAUSSIANS = 20_000
RATES = {  # learning rates as splatfacto's at the start of a run
    "means": 1.6e-4,
    "quats": 1e-3,
    "scales": 5e-3,
    "opacities": 5e-2,
    "features_dc": 2.5e-3,
    "features_rest": 2.5e-3 / 20,
}
OPENGL_TO_OPENCV = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0]))


@dataclass
class Scene:
    name: str
    gaussians: Gaussians
    views: list[tuple[Cameras, Tensor]]  # one view each, with its photo [1, H, W, 3] uint8


def gaussians_from(points: Tensor, colors: Tensor) -> Gaussians:
    """20,000 Gaussians from points [P, 3] (world) and colours [P, 3] (0 to 255): repeated, moved about a little."""
    generator = torch.Generator().manual_seed(0)
    source = torch.arange(GAUSSIANS) % len(points)
    nearest = torch.cdist(points, points).topk(4, largest=False).values[:, 1:].mean(1)
    offsets = torch.randn(GAUSSIANS, 3, generator=generator) * 0.5 * nearest[source, None]
    parameters = from_points(points[source] + offsets, colors[source], 3, GAUSSIANS, seed=0)
    return Gaussians(**parameters, ids=torch.arange(GAUSSIANS))


def camera(camera_to_world: Tensor, fx: float, fy: float, cx: float, cy: float) -> Cameras:
    """One view; camera_to_world [4, 4] has OpenGL axes."""
    return Cameras(
        viewmats=(camera_to_world @ OPENGL_TO_OPENCV).inverse()[None].contiguous(),
        intrinsics=torch.tensor([[fx, fy, cx, cy]]),
        sizes=torch.tensor([[WIDTH, HEIGHT]], dtype=torch.int32),
        width=WIDTH,
        height=HEIGHT,
    )


def fox(folder: Path) -> Scene:
    meta = json.loads((folder / "transforms.json").read_text())
    vertices = read_vertices(folder / meta["ply_file_path"])
    points = torch.from_numpy(np.stack([vertices[c] for c in "xyz"], 1))
    colors = torch.from_numpy(np.stack([vertices[c] for c in ("red", "green", "blue")], 1))
    views = []
    for frame in meta["frames"]:
        photo = torch.from_numpy(np.asarray(Photo.open(folder / frame["file_path"]).convert("RGB")).copy())
        pose = torch.tensor(frame["transform_matrix"])
        views.append((camera(pose, meta["fl_x"], meta["fl_y"], meta["cx"], meta["cy"]), photo[None]))
    return Scene("fox_tiny", gaussians_from(points, colors), views)


def synthetic() -> Scene:
    """A ball of coloured points seen from a ring of cameras, against photos of noise."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(4000, 3, generator=generator)
    colors = torch.rand(4000, 3, generator=generator) * 255
    views = []
    for i in range(8):
        angle = 2 * math.pi * i / 8
        pose = torch.eye(4)
        pose[:3, 0] = torch.tensor([math.cos(angle), 0.0, -math.sin(angle)])
        pose[:3, 2] = torch.tensor([math.sin(angle), 0.0, math.cos(angle)])
        pose[:3, 3] = 5 * pose[:3, 2]
        photo = torch.randint(256, (1, HEIGHT, WIDTH, 3), generator=generator, dtype=torch.uint8)
        views.append((camera(pose, 230.0, 230.0, WIDTH / 2, HEIGHT / 2), photo))
    return Scene("synthetic", gaussians_from(points, colors), views)


def scene() -> Scene:
    data = Path(os.environ.get("BYTESPLAT_TEST_DATA", ROOT.parent / "shared" / "data"))
    return fox(data / "fox_tiny") if (data / "fox_tiny").is_dir() else synthetic()


def train(backend: ModuleType, scene: Scene) -> Iterator[dict[str, float]]:
    """Trains on and on; yields what each step took by stage (ms), and how many records and pairs it had."""
    settings = RenderSettings()
    gaussians = scene.gaussians
    parameters = {name: getattr(gaussians, name).clone() for name in Gaussians.PARAMETERS}
    gaussians = Gaussians(**parameters, ids=gaussians.ids)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    background = torch.full((1, 3), 0.5)
    step = 0
    while True:
        cameras, photo = scene.views[7 * step % len(scene.views)]
        step += 1
        times = [time.perf_counter()]
        records = backend.project(gaussians, cameras, settings)
        times.append(time.perf_counter())
        tiles = backend.bin(records, cameras)
        times.append(time.perf_counter())
        image = backend.rasterize(records, tiles, cameras, settings)
        times.append(time.perf_counter())
        _, d_image = backend.loss(image, photo, background, cameras)
        times.append(time.perf_counter())
        rows = backend.rasterize_backward(records, tiles, cameras, settings, image, d_image)
        times.append(time.perf_counter())
        gradients = backend.project_backward(gaussians, cameras, settings, records, rows).parameters()
        times.append(time.perf_counter())
        for name, parameter in parameters.items():
            backend.adam(parameter, gradients[name], *moments[name], lr=RATES[name], step=step)
        times.append(time.perf_counter())
        stages = ("project", "bin", "rasterize", "loss", "rasterize_backward", "project_backward", "adam")
        took = {stage: 1e3 * (times[i + 1] - times[i]) for i, stage in enumerate(stages)}
        yield {**took, "step": 1e3 * (times[-1] - times[0]), "records": len(records), "pairs": len(tiles.records)}


def measure(backend: ModuleType, scene: Scene, warmup: int, steps: int) -> dict[str, float]:
    """Medians over some steps of what ``train`` yields."""
    trained = train(backend, scene)
    measured = [next(trained) for _ in range(warmup + steps)][warmup:]
    return {name: round(float(np.median([step[name] for step in measured])), 3) for name in measured[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="measured steps, after 20 others")
    parser.add_argument("--no-reference", action="store_true", help="do not time the torch reference")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    origin = provenance() | {"device": cpu_model()}

    where = scene()
    result = {"cpu": measure(cpu, where, 20, options.steps)}
    if not options.no_reference:
        result["reference"] = measure(reference, where, 1, 3)

    print(f"{where.name}, {GAUSSIANS} Gaussians, {WIDTH} x {HEIGHT}, {options.threads} threads; medians in ms")
    print(f"{'':20}" + "".join(f"{name:>12}" for name in result))
    for name in result["cpu"]:
        print(f"{name:20}" + "".join(f"{column[name]:12.2f}" for column in result.values()))
    if "reference" in result:
        print(f"faster than the reference by a factor of {result['reference']['step'] / result['cpu']['step']:.0f}")

    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps(
            {
                **origin,
                "library": cpu_library.level(),
                "threads": options.threads,
                "scene": where.name,
                "gaussians": GAUSSIANS,
                "width": WIDTH,
                "height": HEIGHT,
                "median_ms": result,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
