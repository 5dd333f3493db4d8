"""Metrics over all photos of a split.

As nerfstudio's own, but a photo too small for a metric (SSIM needs 11 pixels a side, LPIPS 64) is left out of that
metric's mean only: stock code takes the first photo's metrics for those of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from nerfstudio.cameras.cameras import Cameras
from rich.progress import track
from torchvision.utils import save_image

from bytesplat_ns.parallel.ranks import ALONE, Ranks
from bytesplat_ns.run.interrupt import Interrupted

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModel


class Views(Sized, Protocol):
    """Camera [1] and data of each photo."""

    def __getitem__(self, number: int) -> tuple[Cameras, dict[str, Any]]: ...


def evaluate(
    model: ByteSplatModel, views: Views, output: Path | None, prefix: str, ranks: Ranks = ALONE
) -> list[dict[str, float]]:
    """Metrics of each photo, and rendered photos per second, as nerfstudio measures them: metrics included.

    Args:
        views: as they are looked at.
        output: folder for comparisons of photo and render, ``<prefix>_<kind>_<number>.png``.
        ranks: each has a part of the model and looks at its share of the views, for which all render together.

    Raises:
        Interrupted: several ranks have heard of a signal.
    """
    if output is not None:
        output.mkdir(exist_ok=True, parents=True)
    rows = []
    turns = range(0, len(views), ranks.size)
    for turn in track(turns, description="Evaluating all photos", transient=True):
        ranks.wait()
        if ranks.size > 1 and ranks.heard:
            raise Interrupted
        number = turn + ranks.rank
        if number >= len(views):
            model.render_for_others()
            continue
        camera, batch = views[number]
        start = perf_counter()
        outputs = model.get_outputs_for_camera(camera=camera)
        metrics, images = model.get_image_metrics_and_images(outputs, batch)
        for kind, image in images.items() if output is not None else ():
            save_image(image.permute(2, 0, 1).cpu(), output / f"{prefix}_{kind}_{number:04d}.png")
        fps = 1 / (perf_counter() - start)
        rays = int(camera.height) * int(camera.width)
        rows.append({**metrics, "num_rays_per_sec": rays * fps, "fps": fps})
    return [row for several in ranks.share(rows) for row in several]


def averages(rows: Iterable[Mapping[str, float]], with_std: bool) -> dict[str, float]:
    """Mean of each metric over the rows that have it; with_std: and, for two or more, the standard deviation."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(float(value))
    result = {}
    for name, numbers in values.items():
        sample = torch.tensor(numbers)
        result[name] = float(sample.mean())
        if with_std and len(numbers) > 1:
            result[f"{name}_std"] = float(sample.std())
    return result
