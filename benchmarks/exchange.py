"""What ranks tell each other about trained models: how many gradient rows are zero, and bytes with and without them.

    python benchmarks/exchange.py --data DATA [MORE] [--images 1008] [--ranks 2 4 8]

Trains method bytesplat on one rank, then shows the training photos once more and counts. Rows are compared with those
that would travel for each (Gaussian, view) whose box of three standard deviations, as a plain radius makes it, touches
the image: what 3DGS, gsplat and Grendel-GS call visible. They would take 36 bytes each, or 48 with statistics of
density control. ``saved`` is the part of these bytes that does not travel; ``saved_at_equal_size`` is so with rows of
36 and 48 bytes on both sides, the masks included.

For each number of ranks the Gaussians are divided into KD cells, a photo belongs to the rank with most of its records,
and ``mb_per_image`` is what goes from one rank to another. Printed, and kept as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from in_process import quality, train
from provenance import provenance
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.ops import fused, wire
from bytesplat_ns.ops.layout import (
    ABSGRAD,
    DEPTH,
    MEAN2D,
    Cameras,
    Gaussians,
    Image,
    ImageGradients,
    RenderSettings,
)
from bytesplat_ns.ops.reference.projection import _splat
from bytesplat_ns.parallel import partition
from bytesplat_ns.parallel.exchange import PHOTOMETRIC
from bytesplat_ns.parallel.ranks import ALONE
from bytesplat_ns.pipeline import ByteSplatPipeline

RESULT = Path(__file__).parent / "results" / "exchange.json"

COLUMNS = {"gradients": PHOTOMETRIC, "with_statistics": (*PHOTOMETRIC, *range(ABSGRAD.start, ABSGRAD.stop))}
PLAIN_BYTES = {"gradients": 36, "with_statistics": 48}


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


def encoded_bytes(rows: Tensor, parts: list[int], columns: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of the mask and of the rows that are left."""
    encoded = ops.encode_rows(rows, parts, columns)
    return encoded.mask.nbytes, 4 * len(columns) * int(encoded.counts.sum())


def measure(pipeline: ByteSplatPipeline, sizes: list[int]) -> dict[str, Any]:
    """Counts over all training photos, each shown alone."""
    model, photos = pipeline.model, len(pipeline.datamanager.train_dataset)
    gaussians, settings = model.gaussians(), model.settings(statistics=True)
    loads = torch.ones_like(gaussians.ids)
    cells = {k: partition.divide(k, gaussians.means, gaussians.ids, loads, ALONE) for k in sizes}
    owners = {k: cells[k].owners(gaussians.means, gaussians.ids) for k in sizes}
    count, between = Counter(), {k: Counter() for k in sizes}
    for index in range(photos):
        views = [pipeline.datamanager._view(index, 1)]
        cameras, _ = pipeline._collate.cameras(views)
        batch = pipeline._collate.batch(views, cameras, slice(0, 1))
        background = model.training_backgrounds(1)

        def loss(image: Image, batch: Any = batch, background: Tensor = background) -> tuple[Tensor, ImageGradients]:
            return pipeline._loss(image, batch, background)

        there = fused.differentiate(gaussians, cameras, settings, loss)
        rows = there.rows.contiguous()
        count["box"] += box_visible(gaussians, cameras, settings)
        count["records"] += len(rows)
        for name, columns in COLUMNS.items():
            mask, left = encoded_bytes(rows, [len(rows)], columns)
            count[f"{name} mask"] += mask
            count[f"{name} left"] += left
        for k in sizes:
            owner = owners[k][there.records.gaussian.long()]
            order = owner.argsort(stable=True)
            parts = torch.bincount(owner, minlength=k).tolist()
            here = max(range(k), key=parts.__getitem__)
            foreign = rows[order][owner[order] != here]
            away = [part for rank, part in enumerate(parts) if rank != here]
            between[k]["ranks of a view"] += sum(part > 0 for part in parts)
            between[k]["records"] += 4 * wire.WIDTH * len(foreign)
            for name, columns in COLUMNS.items():
                between[k][f"{name} dense"] += 4 * len(columns) * len(foreign)
                between[k][f"{name} compact"] += sum(encoded_bytes(foreign, away, columns))
    result: dict[str, Any] = {
        "gaussians": len(gaussians),
        "box_visible_per_image": round(count["box"] / photos),
        "records_per_image": round(count["records"] / photos),
    }
    for name, columns in COLUMNS.items():
        mask, left, plain = count[f"{name} mask"], count[f"{name} left"], PLAIN_BYTES[name]
        kept = left / (4 * len(columns))
        result[name] = {
            "row_bytes": 4 * len(columns),
            "zero_share_of_records": round(1 - kept / count["records"], 4),
            "zero_share_of_box_visible": round(1 - kept / count["box"], 4),
            "bytes_per_image": round((mask + left) / photos),
            "saved": round(1 - (mask + left) / (plain * count["box"]), 4),
            "saved_at_equal_size": round(1 - (mask + plain * kept) / (plain * count["box"]), 4),
            "saved_against_dense": round(1 - (mask + left) / (4 * len(columns) * count["records"]), 4),
        }
    result["mb_per_image"] = {
        str(k): {"ranks_of_a_view": round(counts.pop("ranks of a view") / photos, 2)}
        | {name: round(value / photos / 1e6, 4) for name, value in counts.items()}
        for k, counts in between.items()
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--images", type=int, default=1008)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {**provenance(), "images": options.images, "cases": []}
    for data in options.data:
        pipeline = train(data, options.images, seed=0)
        measured = measure(pipeline, options.ranks)
        result["cases"].append({"data": data.name, "psnr": round(quality(pipeline), 2)} | measured)
        print(json.dumps(result["cases"][-1], indent=1), flush=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
