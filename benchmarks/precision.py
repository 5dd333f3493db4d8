"""Gradients that travel between ranks in half the bytes: what rounding them to bfloat16 does to a model.

    python benchmarks/precision.py --data DATA [MORE] [--images 1008] [--ranks 2] [--seeds 3] [--max-gaussians 20000]

Printed of each run, and kept as JSON: PSNR on every 8th photo, which is held out, Gaussians, and bytes of gradient rows
and their masks that ranks sent each other for an image, as the run's log says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from consolidation import ns_train
from provenance import provenance

RESULT = Path(__file__).parent / "results" / "precision.json"

PRECISIONS = ("float32", "bfloat16")


def run(data: Path, precision: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    words = {
        "--data": data,
        "--machine.seed": seed,
        "--pipeline.datamanager.train-cameras-sampling-seed": seed,
        "--max-num-iterations": options.images,
        "--pipeline.model.max-gaussians": options.max_gaussians,
        "--pipeline.model.gradient-precision": precision,
    }
    with tempfile.TemporaryDirectory() as folder:
        _, entries = ns_train(words, options.ranks, Path(folder))
    steps = [entry for entry in entries if "sent_rows" in entry]
    evaluated = [entry for entry in entries if "eval_psnr" in entry]
    return {
        "psnr": round(evaluated[-1]["eval_psnr"], 3),
        "gaussians": steps[-1]["gaussians"],
        "gradient_bytes_per_image": round(sum(e["sent_rows"] + e["sent_masks"] for e in steps) / steps[-1]["images"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--images", type=int, default=1008)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-gaussians", type=int, default=20_000)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("images", "ranks", "max_gaussians")}
    result: dict[str, Any] = {**provenance(), **settings, "cases": []}
    for data in options.data:
        cases = [{"data": data.name, "precision": precision, "runs": []} for precision in PRECISIONS]
        result["cases"] += cases
        for seed, case in product(range(options.seeds), cases):
            case["runs"].append(run(data, case["precision"], seed, options))
            case["psnr_mean"] = round(statistics.mean(row["psnr"] for row in case["runs"]), 3)
            print(case["data"], case["precision"], case["runs"][-1], flush=True)
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
