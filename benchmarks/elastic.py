"""Training that begins on three ranks and goes on, from the middle, on one, two and four, and that on three to its end.

    python benchmarks/elastic.py --data DATA [--images 1200] [--views-per-round 4] [--output results.json]

Prints PSNR on every 8th photo, which is held out, and the number of Gaussians of each run; ``identical`` says whether
parameters, optimizer and statistics of all Gaussians are those of the first run to the last bit, as on CPUs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from consolidation import ns_train
from provenance import provenance
from ranks import identical, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--views-per-round", type=int, default=4)
    parser.add_argument("--max-gaussians", type=int, default=10_000)
    parser.add_argument("--begun-on", type=int, default=3)
    parser.add_argument("--resumed-on", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("images", "views_per_round", "max_gaussians", "begun_on")}
    words = {
        "--data": options.data,
        "--max-num-iterations": options.images,
        "--pipeline.datamanager.views-per-round": options.views_per_round,
        "--pipeline.model.max-gaussians": options.max_gaussians,
    }
    half = options.images // options.views_per_round // 2
    keep = {"--steps-per-save": half, "--save-only-latest-checkpoint": False}
    origin, rows = provenance(), []
    with tempfile.TemporaryDirectory() as name:
        run, entries = ns_train(words | keep, options.begun_on, Path(name) / "whole")
        row, expected = outcome(run, entries)
        rows.append({"ranks": [options.begun_on], **row})
        print(rows[-1], flush=True)
        for ranks in options.resumed_on:
            resume = {"--load-dir": run / "nerfstudio_models", "--load-step": half}
            row, tables = outcome(*ns_train(words | resume, ranks, Path(name) / str(ranks)))
            row["identical"] = identical(tables, expected)
            row["gaussians_share"] = row["gaussians"] / len(expected["ids"])
            row["psnr_difference"] = row["held_out_psnr"] - rows[0]["held_out_psnr"]
            rows.append({"ranks": [options.begun_on, ranks], **row})
            print(rows[-1], flush=True)
    if options.output:
        options.output.write_text(json.dumps(origin | settings | {"runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
