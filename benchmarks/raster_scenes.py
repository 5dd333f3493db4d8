"""What the benchmarks of the rasterizer look at: synthetic rooms, and trained models through a training view."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from room import room
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, Gaussians, RenderSettings

WIDTH, HEIGHT = 1600, 1064
"""Of the view of a room."""


@dataclass(frozen=True)
class Scene:
    """One view of Gaussians, and the photo that it should look like."""

    name: str
    gaussians: Gaussians
    cameras: Cameras  # one view, of the photo's size
    settings: RenderSettings
    target: Tensor  # [1, H, W, 3] uint8
    background: Tensor  # [1, 3]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which scenes; ``scenes`` takes what is parsed."""
    parser.add_argument("--sizes", type=int, nargs="*", default=[200_000, 1_000_000, 3_000_000], help="none: no rooms")
    parser.add_argument(
        "--trained", type=Path, nargs="*", default=[], help="folders of runs, .ckpt, .ply or .spz files"
    )
    parser.add_argument("--data", type=Path, help="what they were trained on, in nerfstudio's format")
    parser.add_argument("--views", type=int, nargs="+", default=[0], help="training views, by their place in the split")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses what would fail later, on the GPU."""
    if options.trained and options.data is None:
        parser.error("--trained needs --data: the folder with the photos that the models were trained on.")
    for path in options.trained:
        if not path.exists():
            parser.error(f"--trained {path}: there is no such file or folder.")
    if options.data is not None and not (options.data / "transforms.json").is_file():
        parser.error(f"--data {options.data} has no transforms.json.")


def scenes(options: argparse.Namespace) -> Iterator[Callable[[], Scene]]:
    """Makers of the scenes that were asked for, so that no more than one need be in memory."""
    for count in options.sizes:
        yield lambda count=count: synthetic(count)
    for path in options.trained:
        for view in options.views:
            yield lambda path=path, view=view: trained(path, options.data, view)


def synthetic(count: int) -> Scene:
    """A room of ``count`` Gaussians; its photo is noise."""
    gaussians, cameras = room(count, WIDTH, HEIGHT)
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (1, HEIGHT, WIDTH, 3)
    target = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
    background = torch.rand(1, 3, device="cuda", generator=generator)
    return Scene(f"room of {count:,}", gaussians, cameras, RenderSettings(), target, background)


def trained(path: Path, data: Path, view: int, device: str = "cuda") -> Scene:
    """A trained model through one of the views that it was trained on, at full resolution.

    Args:
        path: a run's folder, of which the latest checkpoint is taken, or any file that ``init-from`` takes.
        view: place among the training views, every 8th photo being held out.

    Raises:
        SystemExit: there is no such view, or its photo has a mask or alpha.
    """
    from in_process import configured

    from bytesplat_ns.run import checkpoint
    from bytesplat_ns.splats import read

    file = checkpoint.latest(path / "nerfstudio_models") if path.is_dir() else path
    if file is None:
        raise SystemExit(f"{path / 'nerfstudio_models'} holds no checkpoint.")
    config = configured(data, seed=0)
    antialiased = read.read(file).antialiased
    model_options = config.pipeline.model
    model_options.init_from, model_options.max_gaussians = file, 2**31 - 1
    model_options.rasterize_mode = "antialiased" if antialiased else "classic"
    pipeline = config.pipeline.setup(device=device, test_mode="val")
    count = len(pipeline.datamanager.train_dataset)
    if not 0 <= view < count:
        raise SystemExit(f"--views {view}: {data} has {count} training views.")
    seen = pipeline.datamanager.view(view, downscale=1)
    if seen.mask is not None or seen.image.shape[-1] != 3:
        raise SystemExit(f"Photo {view} of {data} has a mask or alpha, which the other side's loss has not.")
    cameras = _camera(pipeline.datamanager.training_cameras(torch.device(device)), view)
    name = f"{path.name} ({pipeline.model.num_points:,}), view {view}"
    background = torch.zeros(1, 3, device=device)
    settings = pipeline.model.settings(statistics=True)
    target = seen.image[None].to(device).contiguous()
    return Scene(name, pipeline.model.gaussians(), cameras, settings, target, background)


def _camera(cameras: Cameras, view: int) -> Cameras:
    """One of several views, stored at its own size."""
    one = cameras.view(view)
    width, height = one.sizes[0].tolist()
    return Cameras(one.viewmats, one.intrinsics, one.sizes, width, height)
