"""Whole runs of the pipeline on a fixed plan of rounds, on any number of ranks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bytesplat_ns.density.base import DensityReport
from bytesplat_ns.parallel.ranks import Ranks
from bytesplat_ns.rounds import Plan, Round, permutation


@dataclass(frozen=True)
class Course:
    """What is trained: the same on any number of ranks."""

    data: Path
    rounds: int
    views: tuple[int, ...]  # of a round, over and over
    seed: int = 0
    model: dict[str, Any] = field(default_factory=dict)

    def plan(self, photos: int) -> list[list[int]]:
        """Photos of each round, ascending."""
        order = [i for epoch in range(self.rounds * max(self.views)) for i in permutation(self.seed, epoch, photos)]
        plan = []
        for number in range(self.rounds):
            views = self.views[number % len(self.views)]
            plan.append(sorted(map(int, order[:views])))
            del order[:views]
        return plan


def train(ranks: Ranks, course: Course) -> dict[str, Any]:
    """Parameters of this rank's Gaussians and their ids, moments, losses by round, changes of density and pruning."""
    from bytesplat_ns.config import bytesplat
    from bytesplat_ns.parallel.sharing import Sharing

    config = deepcopy(bytesplat.config)
    config.pipeline.datamanager.data = course.data
    config.pipeline.rebalance_threshold = 1.01
    for name, value in course.model.items():
        setattr(config.pipeline.model, name, value)
    torch.manual_seed(course.seed)
    pipeline = config.pipeline.setup(device="cpu", test_mode="val")
    pipeline.train()
    data = pipeline.datamanager
    photos = len(data.train_dataset)
    plan = course.plan(photos)

    # Owners ascend with the photos, so a round has one order of views however many owners they have.
    owners = tuple(index * ranks.size // photos for index in range(photos))
    data.sharing = Sharing(Plan(0, photos, max(course.views)), owners, tuple(1 << owner for owner in owners))
    data._shared = True
    pipeline.start_training(sum(map(len, plan)), config.optimizers)
    losses, changes, pruned = [], [], []
    rows, zero = pipeline.ranks.rows, pipeline.ranks.zero_rows  # of earlier runs of this process
    for indices in plan:
        views = [data.view(index, pipeline.model.downscale()) for index in indices]
        data.next_round = lambda position, downscale, views=views: Round(views, position)
        report = pipeline.train_round()
        losses.append(report.losses.tolist())
        changes += [report.density] if report.density else []
        pruned += [(judged.pruned, judged.kept, judged.before, judged.after) for judged in report.pruning]
        data.sharing = Sharing(data.sharing.plan, owners, data.sharing.rank_sets)
    return {
        "ids": pipeline.store.ids,
        "tables": {name: table.detach() for name, table in pipeline.store.tables().items()},
        "shared": {name: p.detach() for name, p in shared_parameters(pipeline.model).items()},
        "losses": losses,
        "changes": changes,
        "pruned": pruned,
        "next_id": pipeline.store.next_id,
        "zero": (pipeline.ranks.rows - rows, pipeline.ranks.zero_rows - zero),
    }


def shared_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """What all ranks hold alike."""
    return {name: p for name, p in model.named_parameters() if "gauss_params" not in name}


def by_id(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The tables of all ranks, in the order of ids."""
    ids, order = torch.cat([result["ids"] for result in results]).sort()
    tables = {name: torch.cat([r["tables"][name] for r in results])[order] for name in results[0]["tables"]}
    return tables | {"ids": ids}


def losses(results: list[dict[str, Any]]) -> list[list[float]]:
    """Losses of each round's views, in their order."""
    return [[loss for part in parts for loss in part] for parts in zip(*(r["losses"] for r in results), strict=True)]


def total(changes: list[DensityReport]) -> dict[str, int]:
    """Changes of a run, added up."""
    return {name: sum(getattr(change, name) for change in changes) for name in ("duplicated", "split", "pruned")}
