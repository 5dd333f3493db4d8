"""Views in a round at equal images seen: what a larger round costs in quality (``schedules.RoundScale``).

    python benchmarks/batch.py --data DATA [MORE] [--images 1050] [--views 1 2 4 8] [--seeds 3]

Trains method bytesplat from the same start for each number of views and each seed. Printed, and kept as JSON: PSNR on
every 8th photo, which is held out, and the number of Gaussians; means over the seeds, and how far they are from those
of one view a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from in_process import quality, train
from provenance import provenance

RESULT = Path(__file__).parent / "results" / "batch.json"


def measure(data: Path, images: int, views: int, seeds: int) -> dict[str, Any]:
    psnrs, gaussians = [], []
    for seed in range(seeds):
        pipeline = train(data, images, seed, views)
        psnrs.append(round(quality(pipeline), 3))
        gaussians.append(pipeline.model.num_points)
        print(f"{data.name}, {views} views a round, seed {seed}: {psnrs[-1]} dB, {gaussians[-1]}", flush=True)
    mean = {"psnr_mean": round(statistics.mean(psnrs), 3), "gaussians_mean": round(statistics.mean(gaussians))}
    return {"data": data.name, "views": views, "psnr": psnrs, "gaussians": gaussians} | mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--images", type=int, default=1050)
    parser.add_argument("--views", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {**provenance(), "images": options.images, "cases": []}
    for data in options.data:
        cases = [measure(data, options.images, views, options.seeds) for views in options.views]
        for case in cases:
            case["psnr_difference"] = round(case["psnr_mean"] - cases[0]["psnr_mean"], 3)
            print("  ".join(f"{name} {value}" for name, value in case.items()), flush=True)
        result["cases"] += cases
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
