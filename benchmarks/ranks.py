"""One training on 1, 2, 3 and 4 ranks: what the number of ranks changes in the model, which should be nothing.

    python benchmarks/ranks.py --data DATA [--images 1050] [--views-per-round 4] [--ranks 1 2 3 4] [--output JSON]

Printed of each run: steps, PSNR on every 8th photo, which is held out, Gaussians at the end and at most, after how many
steps there were more or fewer, what rounds of pruning took away, and the difference to the first run; ``identical``
says whether parameters, optimizer and statistics of all Gaussians are the same to the last bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from consolidation import ns_train
from provenance import provenance

from bytesplat_ns.parallel import checkpoint


def outcome(run: Path, entries: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Quality and size of a finished run, and its tables."""
    evaluated = [entry for entry in entries if "eval_psnr" in entry]
    tables = checkpoint.split(checkpoint.read(max(run.glob("nerfstudio_models/step-*.ckpt"))))[1]
    return {"held_out_psnr": evaluated[-1]["eval_psnr"], "gaussians": len(tables["ids"])}, tables


def identical(tables: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return tables.keys() == expected.keys() and all(torch.equal(tables[name], expected[name]) for name in expected)


def changes(entries: list[dict[str, Any]]) -> dict[str, int]:
    """Steps of a run, and what became of the number of Gaussians."""
    counts = [entry["gaussians"] for entry in entries if "loss" in entry]
    differences = [after - before for before, after in pairwise(counts)]
    return {
        "steps": len(counts),
        "most_gaussians": max(counts),
        "times_more": sum(difference > 0 for difference in differences),
        "times_fewer": sum(difference < 0 for difference in differences),
        "pruned_in_rounds": sum(entry["pruned"] * entry["kept"] for entry in entries if "pruned" in entry),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1050)
    parser.add_argument("--views-per-round", type=int, default=4)
    parser.add_argument("--max-gaussians", type=int, default=20_000)
    parser.add_argument("--prune-share", type=float, default=0.1)
    parser.add_argument("--prune-budget", type=int, default=123)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    words = {
        "--data": options.data,
        "--max-num-iterations": options.images,
        "--pipeline.datamanager.views-per-round": options.views_per_round,
        "--pipeline.model.max-gaussians": options.max_gaussians,
        "--pipeline.model.prune-share": options.prune_share,
        "--pipeline.model.prune-budget": options.prune_budget,
    }
    settings = {name.rpartition(".")[2].lstrip("-").replace("-", "_"): value for name, value in words.items()}
    settings |= {"data": options.data.name}
    origin, rows, expected = provenance(), [], {}
    with tempfile.TemporaryDirectory() as name:
        for ranks in options.ranks:
            run, entries = ns_train(words, ranks, Path(name) / str(ranks))
            row, tables = outcome(run, entries)
            expected = expected or tables
            row["psnr_difference"] = row["held_out_psnr"] - (rows[0]["held_out_psnr"] if rows else row["held_out_psnr"])
            rows.append({"ranks": ranks, **row, **changes(entries), "identical": identical(tables, expected)})
            print(rows[-1], flush=True)
    if options.output:
        options.output.write_text(json.dumps(origin | settings | {"runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
