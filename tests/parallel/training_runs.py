"""Whole runs of the pipeline, on any number of ranks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bytesplat_ns.density.base import DensityReport
from bytesplat_ns.parallel.ranks import Ranks


@dataclass(frozen=True)
class Course:
    """What is trained: the same on any number of ranks."""

    data: Path
    images: int
    views_per_round: int
    consolidate_views: str = "auto"
    seed: int = 0
    model: dict[str, Any] = field(default_factory=dict)


def train(ranks: Ranks, course: Course) -> dict[str, Any]:
    """Parameters of this rank's Gaussians, ids, moments, losses by round, changes of density and pruning, lists."""
    from bytesplat_ns.config import bytesplat
    from bytesplat_ns.run import residency

    config = deepcopy(bytesplat.config)
    manager = config.pipeline.datamanager
    manager.data, manager.views_per_round = course.data, course.views_per_round
    manager.consolidate_views = course.consolidate_views
    config.pipeline.rebalance_threshold = 1.01
    for name, value in course.model.items():
        setattr(config.pipeline.model, name, value)
    torch.manual_seed(course.seed)
    pipeline = config.pipeline.setup(device="cpu", test_mode="val")
    pipeline.train()
    pipeline.start_training(course.images, config.optimizers)
    pipeline.share_views()
    losses, changes, pruned, records = [], [], [], []
    rows, zero = pipeline.ranks.rows, pipeline.ranks.zero_rows  # of earlier runs of this process
    while pipeline.model.images_seen < course.images:
        report = pipeline.train_round()
        losses.append(report.losses.tolist())
        records.append(int(report.records))
        changes += [report.density] if report.density else []
        pruned += [(judged.pruned, judged.kept, judged.before, judged.after) for judged in report.pruning]
    return {
        "ids": pipeline.store.ids,
        "tables": {name: table.detach() for name, table in pipeline.store.tables().items()},
        "shared": {name: p.detach() for name, p in shared_parameters(pipeline.model).items()},
        "losses": losses,
        "records": records,
        "photos": pipeline.datamanager.owners.count(ranks.rank),
        "changes": changes,
        "pruned": pruned,
        "lists": residency.measure(pipeline, report),
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
