"""How full rounds are when views that no rank sees two of share them: simulated captures of a street and of a district.

    python benchmarks/rounds.py [--output benchmarks/results/rounds.json]

A view sees the cells that lie in a range ahead of it, from 2 % to 20 % of the street, or in a cone. Rounds are held
against the larger of what the most occupied rank and a clique of conflicting views need (``packing.lower_bound``), and
against what a single packing gives, the best of several being kept.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import Counter
from pathlib import Path

from provenance import provenance

from bytesplat_ns import packing


def street(views: int, ranks: int, chance: random.Random) -> list[int]:
    """Bitmasks of the cells, one behind the other, that views along a street see."""
    masks = []
    for _ in range(views):
        here = chance.uniform(0, 1)
        there = here + chance.choice([-1, 1]) * chance.uniform(0.02, 0.2)
        low, high = sorted((here, there))
        masks.append(sum(1 << r for r in range(ranks) if high >= r / ranks and low < (r + 1) / ranks) or 1)
    return masks


def district(views: int, ranks: int, chance: random.Random) -> list[int]:
    """The same for a grid of cells two wide, seen by views anywhere that look anywhere."""
    masks = []
    for _ in range(views):
        x, y, heading = chance.uniform(0, ranks / 2), chance.uniform(0, 2), chance.uniform(0, 2 * math.pi)
        steps = [(0.1 * k, heading + 0.3 * turn) for k in range(13) for turn in (-1, 0, 1)]
        seen = {(math.floor(x + d * math.cos(a)), math.floor(y + d * math.sin(a))) for d, a in steps}
        inside = {(i, j) for i, j in seen if 0 <= i < ranks // 2 and 0 <= j < 2} | {(int(x), int(y))}
        masks.append(sum(1 << 2 * i + j for i, j in inside))
    return masks


def measure(capture, views: int, ranks: int, seeds: int) -> dict[str, float]:
    ratios, single, sizes, seconds = [], [], [], []
    for seed in range(seeds):
        masks = capture(views, ranks, random.Random(seed))
        begin = time.perf_counter()
        rounds = packing.pack(masks, ranks, ranks, seed)
        seconds.append(time.perf_counter() - begin)
        bound, counts = packing.lower_bound(masks, ranks, ranks), Counter(sorted(masks))
        alone = packing._pack_buckets(counts, ranks, ranks, packing.permutation(seed, 0, len(counts), stream=2))
        ratios.append(len(rounds) / bound)
        single.append(len(alone) / bound)
        sizes.append(views / len(rounds))
    return {
        "rounds_over_bound_max": max(ratios),
        "rounds_over_bound_mean": statistics.mean(ratios),
        "single_packing_over_bound_max": max(single),
        "views_per_round_mean": statistics.mean(sizes),
        "seconds_mean": statistics.mean(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    origin, rows = provenance(), []
    for capture in (street, district):
        for ranks in (4, 8, 16):
            for views in (100, 1000, 5000):
                case = {"capture": capture.__name__, "ranks": ranks, "views": views}
                rows.append(case | measure(capture, views, ranks, arguments.seeds))
                print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    if arguments.output:
        content = origin | {"seeds": arguments.seeds, "cases": rows}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
