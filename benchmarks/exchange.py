"""What ranks tell each other about a model: how many gradient rows are zero, and bytes with and without them.

    python benchmarks/exchange.py --data DATA [MORE] [--images 1008 4032] [--city 1000000 4000000] [--ranks 2 4 8]

Trains method bytesplat on one rank, then shows the training photos once more and counts. The synthetic city of
``city_scene.py`` is not trained: its own Gaussians are shown from the streets, where most are hidden, and from the air.

Rows are compared with those that would travel for each (Gaussian, view) whose box of three standard deviations, as a
plain radius makes it, touches the image: what 3DGS, gsplat and Grendel-GS call visible. They would take 36 bytes each,
or 48 with statistics of density control. ``saved`` is the part of these bytes that does not travel;
``saved_at_equal_size`` is so with rows of 36 and 48 bytes on both sides, the masks included.

For each number of ranks the Gaussians are divided into KD cells, a photo belongs to the rank with most of its records,
and ``mb_per_image`` is what goes from one rank to another. Printed, and kept as JSON after each case.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from city_scene import City, look
from in_process import quality, train
from provenance import provenance
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.ops import fused, wire
from bytesplat_ns.ops.layout import DEPTH, MEAN2D, Cameras, Gaussians, RenderSettings
from bytesplat_ns.ops.photometric import PhotometricLoss
from bytesplat_ns.ops.reference.projection import _splat
from bytesplat_ns.parallel import partition
from bytesplat_ns.parallel.exchange import PHOTOMETRIC, WITH_ABSGRAD
from bytesplat_ns.parallel.ranks import ALONE
from bytesplat_ns.pipeline import ByteSplatPipeline

RESULT = Path(__file__).parent / "results" / "exchange.json"

ROWS = {
    "gradients": (PHOTOMETRIC, torch.float32),
    "with_statistics": (WITH_ABSGRAD, torch.float32),
    "gradients_bfloat16": (PHOTOMETRIC, torch.bfloat16),
    "with_statistics_bfloat16": (WITH_ABSGRAD, torch.bfloat16),
}
"""Which numbers of a row travel, and how."""

PLAIN_BYTES = {name: 48 if columns == WITH_ABSGRAD else 36 for name, (columns, _) in ROWS.items()}

CITY_VIEWS, CITY_SIZE = 16, (800, 532)
"""How many views of a city, and their width and height in pixels."""

View = tuple[Cameras, fused.Loss]


@torch.no_grad()
def box_visible(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> int:
    """Pairs of Gaussian and view for which a square of three standard deviations, rounded up, touches the image."""
    visible = 0
    for view in range(len(cameras)):
        index = torch.arange(len(gaussians), device=gaussians.device)
        table, covariance, sound = _splat(gaussians, cameras, settings, index, torch.full_like(index, view))
        xx, xy, yy = covariance.unbind(1)
        radius = (3 * ((xx + yy) / 2 + torch.hypot((xx - yy) / 2, xy)).sqrt()).ceil()
        mean, depth, size = table[:, MEAN2D], table[:, DEPTH], cameras.sizes[view]
        touches = ((mean + radius[:, None] > 0) & (mean - radius[:, None] < size)).all(1)
        visible += int((sound & touches & (depth > settings.near) & (depth < settings.far)).sum())
    return visible


def encoded_bytes(rows: Tensor, parts: list[int], kind: str) -> tuple[int, int, int]:
    """Bytes of the mask and of the rows that are left, and how many of these there are."""
    encoded = ops.encode_rows(rows, parts, *ROWS[kind])
    left = int(encoded.counts.sum())
    return encoded.mask.nbytes, encoded.rows[:left].nbytes, left


def photos(pipeline: ByteSplatPipeline) -> Iterator[View]:
    """Each training photo alone, at full resolution."""
    for index in range(len(pipeline.datamanager.train_dataset)):
        views = [pipeline.datamanager.view(index, 1)]
        cameras, _ = pipeline.collate.cameras(views)
        batch = pipeline.collate.batch(views, cameras, slice(0, 1))
        yield cameras, pipeline.loss_of(batch, pipeline.model.training_backgrounds(1))


def city_views(city: City, aerial: float) -> Iterator[View]:
    """Views of which none matches its photo, grey."""
    width, height = CITY_SIZE
    for pose in city.poses(CITY_VIEWS, aerial).split(1):
        cameras, grey = look(pose, width, height, "cpu"), torch.full((1, height, width, 3), 127, dtype=torch.uint8)
        yield cameras, PhotometricLoss(grey, torch.ones(1, 3), cameras, 0.2, None, fusing="off")


@torch.no_grad()
def measure(gaussians: Gaussians, settings: RenderSettings, views: Iterable[View], sizes: list[int]) -> dict[str, Any]:
    """Counts over all views, each shown alone."""
    loads = torch.ones_like(gaussians.ids)
    cells = {k: partition.divide(k, gaussians.means, gaussians.ids, loads, ALONE) for k in sizes}
    owners = {k: cells[k].owners(gaussians.means, gaussians.ids) for k in sizes}
    count, between, zero_shares = Counter(), {k: Counter() for k in sizes}, []
    for cameras, loss in views:
        there = fused.differentiate(gaussians, cameras, settings, loss)
        rows = there.rows.contiguous()
        count["box"] += box_visible(gaussians, cameras, settings)
        count["records"] += len(rows)
        for name in ROWS:
            mask, left, number = encoded_bytes(rows, [len(rows)], name)
            count[f"{name} bytes"] += mask + left
            count[f"{name} at equal size"] += mask + PLAIN_BYTES[name] * number
            count[f"{name} rows"] += number
        zero_shares.append(round(1 - number / max(len(rows), 1), 4))
        for k in sizes:
            owner = owners[k][there.records.gaussian.long()]
            order = owner.argsort(stable=True)
            parts = torch.bincount(owner, minlength=k).tolist()
            here = max(range(k), key=parts.__getitem__)
            foreign = rows[order][owner[order] != here]
            away = [part for rank, part in enumerate(parts) if rank != here]
            between[k]["ranks of a view"] += sum(part > 0 for part in parts)
            between[k]["records"] += 4 * wire.WIDTH * len(foreign)
            for name, (columns, precision) in ROWS.items():
                if precision == torch.float32:
                    between[k][f"{name} dense"] += 4 * len(columns) * len(foreign)
                between[k][f"{name} compact"] += sum(encoded_bytes(foreign, away, name)[:2])
    return summary(len(gaussians), count, between, zero_shares)


def summary(gaussians: int, count: Counter, between: dict[int, Counter], zero_shares: list[float]) -> dict[str, Any]:
    """Means over the views, and what they say."""
    views = len(zero_shares)
    result: dict[str, Any] = {
        "gaussians": gaussians,
        "views": views,
        "box_visible_per_image": round(count["box"] / views),
        "records_per_image": round(count["records"] / views),
        "zero_share_of_single_views": [min(zero_shares), max(zero_shares)],
    }
    for name, (columns, precision) in ROWS.items():
        rows, sent, plain = count[f"{name} rows"], count[f"{name} bytes"], PLAIN_BYTES[name] * count["box"]
        result[name] = {
            "row_bytes": precision.itemsize * len(columns),
            "zero_share_of_records": round(1 - rows / count["records"], 4),
            "zero_share_of_box_visible": round(1 - rows / count["box"], 4),
            "bytes_per_image": round(sent / views),
            "saved": round(1 - sent / plain, 4),
            "saved_at_equal_size": round(1 - count[f"{name} at equal size"] / plain, 4),
            "saved_against_dense": round(1 - sent / (4 * len(columns) * count["records"]), 4),
        }
    result["mb_per_image"] = {
        str(k): {"ranks_of_a_view": round(counts.pop("ranks of a view") / views, 2)}
        | {name: round(value / views / 1e6, 4) for name, value in counts.items()}
        for k, counts in between.items()
    }
    return result


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for images, data in product(options.images, options.data):
        pipeline = train(data, images, seed=0)
        model = pipeline.model
        settings = model.settings(statistics=True)
        trained = {"data": data.name, "images": images, "psnr": round(quality(pipeline), 2)}
        yield trained | measure(model.gaussians(), settings, photos(pipeline), options.ranks)
    for number, (place, aerial) in product(options.city, {"street": 0.0, "air": 1.0}.items()):
        city = City(number)
        measured = measure(city.gaussians("cpu"), RenderSettings(), city_views(city, aerial), options.ranks)
        yield {"data": f"city, from the {place}", "size": CITY_SIZE} | measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[])
    parser.add_argument("--images", type=int, nargs="+", default=[1008, 4032])
    parser.add_argument("--city", type=int, nargs="+", default=[], help="Gaussians of a city")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {**provenance(), "cases": []}
    for case in cases(options):
        result["cases"].append(case)
        print(json.dumps(case, indent=1), flush=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
