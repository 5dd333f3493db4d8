"""Views in a round at equal images seen: what a larger round costs in quality (``schedules.RoundScale``).

    python benchmarks/batch.py --data DATA [MORE] [--images 1008] [--views 1 2 4 8] [--seeds 3] [--cap N]

Trains method bytesplat from the same start for each number of views and each seed. Printed, and kept as JSON after each
seed: PSNR on every 8th photo, which is held out, and the number of Gaussians; means over the seeds, how far they are
from those of one view a round, and the standard error of that difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

from in_process import quality, train
from provenance import provenance

RESULT = Path(__file__).parent / "results" / "batch.json"


def measure(case: dict[str, Any], data: Path, seed: int, options: argparse.Namespace) -> None:
    """Adds a run to those of its case."""
    capped = {} if options.cap is None else {"max_gaussians": options.cap}
    pipeline = train(data, case["images"], seed, case["views"], **capped)
    case["psnr"].append(round(quality(pipeline), 3))
    case["gaussians"].append(pipeline.model.num_points)


def summarize(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        case["psnr_mean"] = round(statistics.mean(case["psnr"]), 3)
        case["psnr_difference"] = round(case["psnr_mean"] - cases[0]["psnr_mean"], 3)
        if len(case["psnr"]) > 1 and case is not cases[0]:
            variances = [statistics.variance(each["psnr"]) / len(each["psnr"]) for each in (case, cases[0])]
            case["difference_error"] = round(sum(variances) ** 0.5, 3)
        print("  ".join(f"{name} {value}" for name, value in case.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--images", type=int, nargs="+", default=[1008], help="lengths of runs")
    parser.add_argument("--views", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cap", type=int, help="most Gaussians; default: the method's")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {**provenance(), "cap": options.cap, "cases": []}
    for data, images in product(options.data, options.images):
        kind = {"data": data.name, "images": images}
        cases = [kind | {"views": views, "psnr": [], "gaussians": []} for views in options.views]
        result["cases"] += cases
        for seed in range(options.seeds):
            for case in cases:
                measure(case, data, seed, options)
            summarize(cases)
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
