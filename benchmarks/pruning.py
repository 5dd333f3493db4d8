"""Pruning for the hardware against pruning by score alone and none, from the same densified model.

    python benchmarks/pruning.py --data ../shared/data/fox [MORE] [--seeds 3] [--cap N] [--budget K] [--parallel]
        [--minutes M]
    python benchmarks/pruning.py --merge FILE [MORE] --out results.json

Every 8th photo is held out. For each capture and seed one run trains without pruning. From its state at the end of
densification (half of the images) branches set out: for each strength, a part of the Gaussians to be removed in eight
rounds, one with each cost (``--pipeline.model.prune-cost``) and, with ``--contribution``, one that takes the largest
contribution to a pixel in place of the harm. All branches of a strength end with equally many Gaussians; the guard and
the veto are off. With ``--default``, one more has the default schedule, cost, guard and veto, and shares of 0.1.

Printed, kept as JSON, and drawn: PSNR on the held-out photos, effective lengths of the training views' tile lists, time
of a training step. On a CPU that is processor time, on a GPU wall time, of whole steps after the end of training.
``--parallel`` gives each capture and seed a process of its own; while one of them times steps, the others wait. Rows
are kept as they come, so that what there is after ``--minutes`` has its table and plot; ``--merge`` makes them of the
rows of several files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from in_process import configured
from provenance import ROOT, provenance
from torch import Tensor
from turns import Turns

from bytesplat_ns.density.pruning import Lists
from bytesplat_ns.density.survey import HARM_UNIT, Survey
from bytesplat_ns.inspection import Inspection
from bytesplat_ns.pipeline import ByteSplatPipeline
from bytesplat_ns.schedules import REFERENCE_IMAGES

ROUNDS = 8
SPACING = 1_000
"""Images from round to round, of a run of REFERENCE_IMAGES."""

TIMED = {"cpu": 40, "cuda": 400}
"""Steps that are timed."""

NEVER = 1e3
"""dB that no round costs."""


@dataclass
class Branch:
    """Where a run leaves the unpruned one, and how it prunes from there."""

    name: str
    strength: float  # part of the Gaussians to be removed
    options: dict[str, Any]  # of the model
    by_contribution: bool = False


class ByContribution(Inspection):
    """Judges Gaussians by their largest contribution to a pixel."""

    def survey(self, budget: int) -> Survey:
        found = super().survey(budget)
        return replace(found, harm=(found.contribution.double() / HARM_UNIT).long())


class Runs:
    """All runs on one capture with one seed; they share photos and one model."""

    def __init__(self, data: Path, seed: int, options: argparse.Namespace, turns: Turns) -> None:
        self.config = configured(data, seed)
        self.images, self.device = options.images, "cuda" if torch.cuda.is_available() else "cpu"
        self.turns = turns
        self.usual = self.config.pipeline.model
        self.usual.max_gaussians = options.cap
        torch.manual_seed(seed)
        self.pipeline: ByteSplatPipeline = self.config.pipeline.setup(device=self.device, test_mode="val")

    def at(self, reference: int) -> int:
        """Images of this run for those of a run of ``REFERENCE_IMAGES``."""
        return self.images * reference // REFERENCE_IMAGES

    def begin(self, options: dict[str, Any], state: dict[str, Any] | None = None) -> None:
        """A run with these options of the model, from its beginning or from a state."""
        for name, value in options.items():
            setattr(self.usual, name, value)
        self.pipeline.start_training(self.images, self.config.optimizers)
        if state is not None:
            self.pipeline.load_training_state(deepcopy(state))

    def go_on(self, until: int) -> Iterator[str]:
        """Trains until so many images have been seen; yields what pruning reports."""
        while self.pipeline.model.images_seen < until:
            yield from map(str, self.pipeline.train_round().pruning)
            self.turns.offer()

    def state(self) -> dict[str, Any]:
        """What a checkpoint would hold."""
        pipeline = self.pipeline
        shared = {name: optimizer.state_dict() for name, optimizer in pipeline.shared.optimizers.optimizers.items()}
        state = {"step": 0, "pipeline": pipeline.state_dict(), "optimizers": shared}
        return deepcopy(state | {"bytesplat": pipeline.training_state()})

    def measure(self, budget: int) -> dict[str, Any]:
        """Of the model as it is. The steps that are timed change it."""
        pipeline = self.pipeline
        views = Inspection(pipeline.model, pipeline.store, pipeline.datamanager, pipeline.collate, pipeline.ranks)
        quality = pipeline.get_average_eval_image_metrics()
        lengths = views.lengths()
        lists = Lists.of(lengths, budget)
        return {
            "gaussians": pipeline.model.num_points,
            "psnr": quality["psnr"],
            "ssim": quality["ssim"],
            "psnr_train": float(views.psnr().mean()),
            "within": lists.within,
            "p50": lists.median,
            "p95": lists.p95,
            "longest": lists.longest,
            "mean": float(lengths.double().mean()),
            "step_ms": self._step_ms(),
        }

    def _step_ms(self) -> float:
        """The fastest of ten parts of the steps that are timed: other programs only ever slow them down."""
        clock = time.process_time if self.device == "cpu" else _gpu_clock
        part, parts = TIMED[self.device] // 10, []
        with self.turns.alone():
            for _ in range(11):
                start = clock()
                for _ in range(part):
                    self.pipeline.train_round()
                parts.append(1e3 * (clock() - start) / part)
        return min(parts[1:])


def _gpu_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def branches(options: argparse.Namespace, budget: int) -> Iterator[Branch]:
    scheduled = {"prune_start": 15_000, "prune_stop": 15_000 + ROUNDS * SPACING, "prune_every": SPACING}
    for strength in options.strengths:
        share = 1 - (1 - strength) ** (1 / ROUNDS)
        fixed = scheduled | {"prune_share": share, "prune_budget": budget, "prune_guard": NEVER, "prune_veto": 1.0}
        for cost in options.costs:
            yield Branch(cost, strength, fixed | {"prune_cost": cost})
        if options.contribution:
            yield Branch("contribution", strength, fixed | {"prune_cost": "uniform"}, by_contribution=True)


def measure_all(
    data: Path, seed: int, options: argparse.Namespace, turns: Turns, stop_at: float
) -> Iterator[dict[str, Any]]:
    """The rows of one capture and seed; branches that would last longer than until ``stop_at`` are left out."""
    runs = Runs(data, seed, options, turns)
    usual = deepcopy(vars(runs.usual))
    off = {"prune_share": 0.0}
    runs.begin(off)
    early, densified = runs.at(14_900), runs.at(15_000)
    list(runs.go_on(early))
    before_all = runs.state()
    list(runs.go_on(densified))
    half = runs.state()
    pipeline = runs.pipeline
    views = Inspection(pipeline.model, pipeline.store, pipeline.datamanager, pipeline.collate, pipeline.ranks)
    lengths: Tensor = views.lengths()
    budget = options.budget or int(lengths.double().quantile(options.within))
    head = {"data": data.name, "seed": seed, "budget": budget}
    yield head | {"branch": "densified", "strength": 0.0} | runs.measure(budget)
    default = {name: usual[name] for name in usual if name.startswith("prune_")}
    default["prune_share"] = 0.1
    default["prune_budget"] = budget if runs.device == "cpu" else options.budget
    plan = [Branch("none", 0.0, off), *([Branch("default", 0.0, default)] if options.default else [])]
    longest = 0.0
    for branch in [*plan, *branches(options, budget)]:
        start = time.monotonic()
        if start + longest > stop_at:
            print(f"{data.name}, seed {seed}: no time for {branch.name} {branch.strength} and what follows", flush=True)
            return
        runs.begin(branch.options, before_all if branch.name == "default" else half)
        if branch.by_contribution:
            views = pipeline.pruning.views
            pipeline.pruning.views = ByContribution(views.model, views.store, views.data, views.collate, views.ranks)
        log = list(runs.go_on(runs.images))
        row = head | {"branch": branch.name, "strength": branch.strength} | runs.measure(budget)
        seconds = time.monotonic() - start
        longest = max(longest, seconds)
        yield row | {"seconds": seconds, "log": log}


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what pruning changed against the run of the same capture and seed that was not pruned."""
    unpruned = {(row["data"], row["seed"]): row for row in rows if row["branch"] == "none"}
    found = []
    for row in rows:
        if other := unpruned.get((row["data"], row["seed"])):
            row = row | {"psnr_change": row["psnr"] - other["psnr"], "faster": other["step_ms"] / row["step_ms"]}
        found.append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds; "change" (dB) and "faster" are those against the unpruned run of the same seed."""
    lines = [
        f"{'data':16}{'branch':14}{'strength':>9}{'seeds':>6}{'Gaussians':>11}{'PSNR':>8}{'change':>8}{'SSIM':>8}"
        f"{'train':>8}{'within':>8}{'P50':>6}{'P95':>6}{'max':>6}{'step ms':>9}{'faster':>8}"
    ]
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in compared(rows):
        groups.setdefault((row["data"], row["branch"], row["strength"]), []).append(row)
    for (data, branch, strength), group in sorted(groups.items(), key=lambda item: item[0][0]):
        numbers = {k for k, v in group[0].items() if isinstance(v, (int, float)) and all(k in row for row in group)}
        mean = {k: statistics.mean(row[k] for row in group) for k in numbers}
        change = f"{mean['psnr_change']:>+8.3f}" if "psnr_change" in mean else f"{'':8}"
        faster = f"{mean['faster']:>7.2f}x" if "faster" in mean else ""
        lines.append(
            f"{data:16}{branch:14}{strength:>9.2f}{len(group):>6}{mean['gaussians']:>11,.0f}{mean['psnr']:>8.3f}{change}"
            f"{mean['ssim']:>8.4f}{mean['psnr_train']:>8.3f}{mean['within']:>8.1%}{mean['p50']:>6.0f}{mean['p95']:>6.0f}"
            f"{mean['longest']:>6.0f}{mean['step_ms']:>9.3f}{faster}"
        )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """PSNR against step time, a line for each cost, a panel for each capture; means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    captures = list(dict.fromkeys(row["data"] for row in rows))
    figure, panels = pyplot.subplots(1, len(captures), figsize=(5 * len(captures), 4), squeeze=False)
    for panel, data in zip(panels[0], captures, strict=True):
        here = [row for row in rows if row["data"] == data]
        names = dict.fromkeys(row["branch"] for row in here if row["branch"] != "densified")
        for name in names:
            own = [row for row in here if row["branch"] == name]
            points = []
            for strength in dict.fromkeys(row["strength"] for row in own):
                group = [row for row in own if row["strength"] == strength]
                points.append([statistics.mean(row[k] for row in group) for k in ("step_ms", "psnr")])
            panel.plot(*zip(*points, strict=True), marker="o", label=name)
        panel.set(title=data, xlabel="ms a step", ylabel="PSNR on held-out photos, dB")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run(options: argparse.Namespace, result: dict[str, Any], stop_at: float) -> None:
    """Everything in this process, one after another; rows are kept as they come."""
    turns = Turns(options.turns)
    with turns.working():
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for data in options.data:
                for row in measure_all(data, seed, options, turns, stop_at):
                    result["rows"].append(row)
                    write(options.out, result)
                    print(table([row]).splitlines()[1], flush=True)


def run_parallel(options: argparse.Namespace, words: list[str]) -> list[Path]:
    """A process for each capture and seed; returns the files of those that have rows."""
    files, processes = [], []
    given = [word for word in words if word != "--parallel"]
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for data in options.data:
                files.append(options.out.with_name(f"{options.out.stem}_{data.name}_{seed}.json"))
                files[-1].unlink(missing_ok=True)
                own = ["--data", data, "--first-seed", seed, "--seeds", 1, "--out", files[-1]]
                own += ["--turns", Path(folder) / "turns"]
                processes.append(subprocess.Popen([sys.executable, __file__, *given, *map(str, own)]))
        codes = [process.wait() for process in processes]
    for file, code in zip(files, codes, strict=True):
        if code:
            print(f"The process for {file.name} failed ({code}), see above.", flush=True)
    return [file for file in files if file.exists()]


def merged(files: list[Path]) -> dict[str, Any]:
    """Rows of several results of one commit and device.

    Raises:
        SystemExit: there is none, or they are of different origins.
    """
    parts = [json.loads(file.read_text()) for file in files]
    if not parts:
        raise SystemExit("There are no rows: no run came to its first one.")
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        for name in ("commit", "device", "images", "cap"):
            if part[name] != first[name]:
                raise SystemExit(
                    f"{file} has {name} {part[name]}, {files[0]} has {first[name]}: compare like with like."
                )
    return first | {"rows": [row for part in parts for row in part["rows"]]}


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+")
    parser.add_argument("--images", type=int, default=REFERENCE_IMAGES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--cap", type=int, default=3_000_000)
    parser.add_argument("--budget", type=int, help="entries of a tile's list (default: from --within)")
    parser.add_argument("--within", type=float, default=1 / 3, help="part of the tiles within budget when densified")
    parser.add_argument("--strengths", type=float, nargs="*", default=[0.4, 0.6, 0.8])
    parser.add_argument("--costs", nargs="+", default=["uniform", "root", "tiles"])
    parser.add_argument("--contribution", action="store_true")
    parser.add_argument("--default", action="store_true", help="also a run with the default guard and veto")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no branch that would last longer than this")
    parser.add_argument("--parallel", action="store_true", help="a process for each capture and seed")
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--merge", type=Path, nargs="+", help="results to make one of")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "pruning.json")
    options = parser.parse_args()
    if (options.data is None) == (options.merge is None):
        parser.error("Give --data, or --merge with results that there are.")
    stop_at = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.data is not None and not options.parallel:
        result = {**provenance(), "images": options.images, "cap": options.cap, "rows": []}
        run(options, result, stop_at)
    else:
        origin = provenance()
        result = merged(options.merge or run_parallel(options, sys.argv[1:])) | {"command": origin["command"]}
        write(options.out, result)
    if options.turns is None:
        print(table(result["rows"]))
        plot(result, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
