"""Trains a synthetic city of 1M to 120M Gaussians on one device, and says what a step takes.

    python benchmarks/city.py --gaussians 1000000 10000000 100000000 [--deferred-adam off on] [--out results.json]
    python benchmarks/city.py --gaussians 10000000 --write FOLDER     # the same city for ns-train

The photos are rendered from the whole city by our own rasterizer, 8 bits a channel, and kept in memory. Training starts
from a thinned, perturbed copy and runs the pipeline's own step (``ByteSplatPipeline.train_round``). Every 8th view is
held out. Times are those between the ends of steps, medians after a warm-up; memory is torch's peak of allocated bytes.

``--write`` leaves a nerfstudio folder instead: photos, transforms.json and a sparse coloured point cloud. Behind the
city is white: train it with ``--pipeline.model.background-color white``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from city_scene import FOCAL, City, Disorder, look, start
from nerfstudio.cameras.cameras import Cameras as NerfstudioCameras
from nerfstudio.data.datamanagers.base_datamanager import DataManager
from nerfstudio.data.scene_box import SceneBox
from PIL import Image as Picture
from provenance import cpu_model, provenance
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.config import bytesplat
from bytesplat_ns.datamanager import ByteSplatDataManager, ByteSplatDataManagerConfig
from bytesplat_ns.model import ByteSplatModel, ByteSplatModelConfig
from bytesplat_ns.ops.layout import Cameras, Gaussians, RenderSettings
from bytesplat_ns.parallel import ranks
from bytesplat_ns.photos.cache import Photo, PhotoCache
from bytesplat_ns.pipeline import ByteSplatPipeline, ByteSplatPipelineConfig
from bytesplat_ns.run import memory
from bytesplat_ns.run.metrics import psnr
from bytesplat_ns.splats.initialization import SH_C0, Parameters
from bytesplat_ns.splats.ply import write_vertices

HELD_OUT = 8
WARM_UP = 5
"""Steps that are not timed."""

EXAMINED = 16
"""Quality and visibility are means over so many views at most."""

MEANS_RATE = 0.02
"""Learning rate of the means in spacings: splatfacto's, for captures of a few metres, would blow a city apart."""

SPARSE_POINTS = 200_000
"""Points of the cloud in a folder that is written."""


@dataclass
class Capture:
    """Views of a city and what they show."""

    city: City
    poses: Tensor  # [V, 3, 4] on the CPU, OpenGL axes
    photos: Tensor  # [V, H, W, 3] uint8 on the device

    @property
    def training(self) -> list[int]:
        return [view for view in range(len(self.poses)) if view % HELD_OUT]

    @property
    def held_out(self) -> list[int]:
        return list(range(0, len(self.poses), HELD_OUT))

    def cameras(self, views: list[int]) -> Cameras:
        _, height, width, _ = self.photos.shape
        return look(self.poses[views], width, height, self.photos.device)


@torch.no_grad()
def photograph(city: City, gaussians: Gaussians, options: argparse.Namespace) -> Capture:
    """Renders all views, on white, one after another."""
    poses = city.poses(options.views, options.aerial)
    photos = torch.empty(len(poses), options.height, options.width, 3, dtype=torch.uint8, device=gaussians.device)
    capture = Capture(city, poses, photos)
    for view in range(len(poses)):
        photos[view] = (255 * shown(gaussians, capture.cameras([view]))).round().byte()
    return capture


def shown(gaussians: Gaussians, cameras: Cameras) -> Tensor:
    """[H, W, 3] what one view shows on white, 0..1."""
    image, _ = ops.render(gaussians, cameras, RenderSettings(statistics=False))
    return (image.rgb[0] + image.transmittance[0, ..., None]).clamp(0, 1)


# The capture as the pipeline's data and model -------------------------------------------------------------------------


class CityPhotos(ByteSplatDataManager):
    """The data manager's rounds over photos that are in memory already."""

    def __init__(self, capture: Capture, config: ByteSplatDataManagerConfig, device: Any, **_: Any) -> None:
        DataManager.__init__(self)
        self.config, self.device, self.ranks = config, device, ranks.of_process()
        self._shared = self._resumed = False
        views, (height, width) = capture.training, capture.photos.shape[1:3]
        cameras = NerfstudioCameras(
            capture.poses[views], FOCAL * width, FOCAL * width, width / 2, height / 2, width=width, height=height
        )
        self.train_dataset = CityViews(cameras)
        self.eval_dataset = None
        nbytes = [capture.photos[0].nbytes] * len(views)
        self.train_photos = PhotoCache(lambda view: Photo(capture.photos[views[view]]), nbytes, device, sum(nbytes))
        list(self.train_photos.fill(range(len(views))))


class CityViews:
    """What the pipeline asks of a data set."""

    def __init__(self, cameras: NerfstudioCameras) -> None:
        self.cameras = cameras
        self.scene_box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
        self.metadata: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.cameras)


class CityModel(ByteSplatModel):
    """The model, starting from given parameters with all harmonics in use."""

    def _initial_parameters(self, seed: int) -> Parameters:
        self.initial_sh_degree = self.config.sh_degree
        start = self.kwargs.pop("start")
        parameters = dict(start)
        start.clear()  # or these would stay in memory beside those that density control puts in their place
        return parameters


def pipeline_of(
    capture: Capture, parameters: Parameters, deferred_adam: str, options: argparse.Namespace
) -> ByteSplatPipeline:
    """The method's pipeline, ready for ``options.steps`` steps."""
    count, device = len(parameters["means"]), capture.photos.device
    model = ByteSplatModelConfig(background_color="white", num_downscales=0, max_gaussians=count, prune_share=0.0)
    if options.density == "mcmc":
        model.strategy = "mcmc"
    elif options.density == "fixed":
        model.stop_split_at = 0
    model._target = partial(CityModel, start=parameters)
    data = ByteSplatDataManagerConfig(views_per_round=options.views_per_round)
    data._target = partial(CityPhotos, capture)
    config = ByteSplatPipelineConfig(datamanager=data, model=model, deferred_adam=deferred_adam)
    pipeline = ByteSplatPipeline(config, device=device)
    optimizers = deepcopy(bytesplat.config.optimizers)
    rate = MEANS_RATE * capture.city.spacing
    optimizers["means"]["optimizer"].lr, optimizers["means"]["scheduler"] = rate, None
    pipeline.start_training(options.views_per_round * (options.steps + WARM_UP), optimizers)
    pipeline.train()
    return pipeline


# Measurement ----------------------------------------------------------------------------------------------------------


class Clock:
    """Moments on a device's own time line; asking for one waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.moments: list[Any] = []

    def mark(self) -> None:
        if not self.cuda:
            self.moments.append(time.perf_counter())
            return
        self.moments.append(torch.cuda.Event(enable_timing=True))
        self.moments[-1].record()

    def milliseconds(self) -> list[float]:
        """From each moment to the next; waits for the last one."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        if not self.cuda:
            return [1e3 * (end - begin) for begin, end in pairs]
        self.moments[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


@torch.no_grad()
def quality(gaussians: Gaussians, capture: Capture, views: list[int]) -> float:
    """Mean PSNR of some views, dB."""
    views = views[:: -(-len(views) // EXAMINED)]
    values = [psnr(shown(gaussians, capture.cameras([v])), capture.photos[v].float() / 255) for v in views]
    return round(float(torch.stack(values).mean()), 3)


def visibility(gaussians: Gaussians, capture: Capture) -> dict[str, int]:
    """Records and pairs of an average training view, and of the one with the most."""
    settings, records, pairs = RenderSettings(), [], []
    views = capture.training[:: -(-len(capture.training) // EXAMINED)]
    for view in views:
        cameras = capture.cameras([view])
        seen = ops.project(gaussians, cameras, settings)
        records.append(len(seen))
        pairs.append(len(ops.bin(seen, cameras).records))
    return {
        "records_mean": round(statistics.mean(records)),
        "records_max": max(records),
        "pairs_mean": round(statistics.mean(pairs)),
        "pairs_max": max(pairs),
    }


def measure(count: int, deferred_adam: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One size: city, photos, steps."""
    began = time.perf_counter()
    city = City(round(count / options.kept), options.seed)
    capture = photograph(city, city.gaussians(device), options)
    photographed = time.perf_counter()
    disorder = Disorder(options.kept, options.noise)
    parameters = start(city, count, disorder, device, options.order)
    pipeline = pipeline_of(capture, parameters, deferred_adam, options)
    model = pipeline.model
    before = {name: quality(model.gaussians(), capture, getattr(capture, name)) for name in ("training", "held_out")}
    seen = visibility(model.gaussians(), capture)
    prepared = time.perf_counter()

    resident, clock = start_counting_memory(device), Clock(device)
    for step in range(WARM_UP + options.steps):
        if step >= WARM_UP:
            clock.mark()
        pipeline.train_round()
    clock.mark()
    times = clock.milliseconds()
    used = {} if device.type == "cpu" else memory_report(pipeline, capture, resident)
    return {
        "gaussians": count,
        "gaussians_after": model.num_points,
        "deferred": pipeline.optimizer.deferral.lag is not None,
        "ms_per_step": round(statistics.median(times), 3),
        "images_per_s": round(1e3 * options.views_per_round * len(times) / sum(times), 2),
        "psnr_before": before,
        "psnr_after": {name: quality(model.gaussians(), capture, getattr(capture, name)) for name in before},
        **seen,
        **used,
        "seconds_to_photograph": round(photographed - began, 2),
        "seconds_to_start": round(prepared - photographed, 2),
    }


def start_counting_memory(device: torch.device) -> int:
    """Bytes that are allocated on a GPU; its peak counts from now on."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def memory_report(pipeline: ByteSplatPipeline, capture: Capture, resident: int) -> dict[str, int | float]:
    """Peak bytes, what of it stays between steps and what a step adds; and what ``run.memory`` says beforehand."""
    peak, count = torch.cuda.max_memory_allocated(capture.photos.device), pipeline.model.num_points
    _, height, width, _ = capture.photos.shape
    views = pipeline.datamanager.views_per_round
    need = memory.Need.of(pipeline.store, views, width * height, pipeline.strategy.schedule.observes(0))
    return {
        "peak_bytes": peak,
        "photo_bytes": capture.photos.nbytes,
        "resident_bytes_per_gaussian": round((resident - capture.photos.nbytes) / count, 1),
        "step_bytes_per_gaussian": round((peak - resident) / count, 1),
        "step_bytes_per_pixel": round((peak - resident) / (views * width * height), 1),
        "estimated_bytes": need.total(count) + capture.photos.nbytes,
    }


# A folder for ns-train ------------------------------------------------------------------------------------------------


def write_folder(folder: Path, capture: Capture) -> None:
    """Photos, transforms.json and sparse_pc.ply: what nerfstudio's default data parser reads."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    _, height, width, _ = capture.photos.shape
    frames = []
    for view, pose in enumerate(capture.poses):
        name = f"images/frame_{view + 1:05d}.png"
        Picture.fromarray(capture.photos[view].cpu().numpy()).save(folder / name)
        frames.append({"file_path": name, "transform_matrix": [*pose.tolist(), [0.0, 0.0, 0.0, 1.0]]})
    camera = {"camera_model": "PINHOLE", "fl_x": FOCAL * width, "fl_y": FOCAL * width, "w": width, "h": height}
    camera |= {"cx": width / 2, "cy": height / 2, "ply_file_path": "sparse_pc.ply", "frames": frames}
    (folder / "transforms.json").write_text(json.dumps(camera, indent=1))
    count = min(SPARSE_POINTS, capture.city.count)
    points = capture.city.parameters(torch.arange(count) * capture.city.count // count)
    colours = (255 * (0.5 + SH_C0 * points["features_dc"])).clamp(0, 255).byte()
    columns = [*points["means"].T.numpy(), *colours.T.numpy()]
    cloud = dict(zip(("x", "y", "z", "red", "green", "blue"), columns, strict=True))
    write_vertices(folder / "sparse_pc.ply", count, cloud)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaussians", type=int, nargs="+", default=[1_000_000], help="how many are trained")
    parser.add_argument("--views", type=int, default=64)
    parser.add_argument("--aerial", type=float, default=0.5, help="share of the views that are from the air")
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--height", type=int, default=1064)
    parser.add_argument("--steps", type=int, default=100, help="of training, timed, after a few that are not")
    parser.add_argument("--views-per-round", type=int, default=1)
    parser.add_argument("--kept", type=float, default=0.8, help="share of the city that training starts from")
    parser.add_argument("--noise", type=float, default=0.3, help="disorder of the start, see city_scene.py")
    parser.add_argument("--order", choices=("lots", "mixed"), default="mixed", help="of the Gaussians in memory")
    parser.add_argument("--density", choices=("fixed", "default", "mcmc"), default="fixed", help="density control")
    choices = ("auto", "on", "off")
    parser.add_argument("--deferred-adam", choices=choices, nargs="+", default=["off"], help="a run each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write", type=Path, help="write a nerfstudio folder of the first size instead of training")
    parser.add_argument("--out", type=Path, help="JSON file for the results, which are kept after each size")
    options = parser.parse_args()
    if not (0 < options.kept <= 1 and options.views > 1 and min(options.gaussians) > 1):
        parser.error("--kept is in (0, 1]; --views and --gaussians are at least 2")
    device = torch.device(options.device)
    if options.write is not None:
        city = City(round(options.gaussians[0] / options.kept), options.seed)
        write_folder(options.write, photograph(city, city.gaussians(device), options))
        return
    result = {
        **provenance(),
        "device": cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "options": {k: v for k, v in vars(options).items() if k not in ("out", "write")},
        "sizes": [],
    }
    for count, deferred_adam in product(options.gaussians, options.deferred_adam):
        row = measure(count, deferred_adam, options, device)
        gc.collect()  # the pipeline refers to itself
        result["sizes"].append(row)
        print("  ".join(f"{name} {value:,}" for name, value in row.items() if not isinstance(value, dict)))
        print(f"PSNR before {row['psnr_before']}, after {row['psnr_after']}", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
