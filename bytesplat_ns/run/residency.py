"""How the tile lists of a round fit what stays on chip: told at the first report after density has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bytesplat_ns import ops
from bytesplat_ns.density.pruning import Lists
from bytesplat_ns.ops import fused
from bytesplat_ns.ops.residency import residency_budget
from bytesplat_ns.parallel.rendering import look_together

if TYPE_CHECKING:
    from bytesplat_ns.pipeline import ByteSplatPipeline, RoundReport


@torch.no_grad()
def measure(pipeline: ByteSplatPipeline, report: RoundReport) -> dict[str, float]:
    """Looks at the round's views once more, and waits for the device. All ranks must call together.

    Returns:
        Budget, part of the tiles within it and lengths of lists, over all ranks; where one kernel forms image, loss and
        gradients, also the part of its backward pass's records that were on chip. Empty without a budget: on a CPU
        that does not prune.
    """
    model, ranks, batch = pipeline.model, pipeline.ranks, report.batch
    pruning = pipeline.pruning
    budget = residency_budget(model.device) if pruning is None else pruning.budget
    if budget is None:
        return {}
    settings = model.settings(statistics=pipeline.strategy.observes(model.images_seen))
    own = batch.cameras if len(batch) else None
    lengths = torch.zeros(0, dtype=torch.int32, device=model.device)
    reads = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    records = look_together(model.gaussians(), own, settings, ranks, "pruning").seen
    if records is not None:
        tiles = ops.bin(records, own)
        lengths = ops.effective_lengths(records, tiles, own, settings)
        loss = pipeline.loss_of(batch, report.background)
        reads = fused.reads_on_chip(records, tiles, own, settings, loss)[None]
    lists = Lists.of(ranks.gather(lengths, "pruning"), budget)
    on_chip, read = ranks.gather(reads, "pruning").sum(0).tolist()
    values = {"lists_budget": budget} | {f"lists_{name}": value for name, value in vars(lists).items()}
    return values | ({"reads_on_chip": on_chip / read} if read else {})


def summary(values: dict[str, float]) -> str:
    """One line of what ``measure`` found."""
    found = {name.removeprefix("lists_"): value for name, value in values.items() if name.startswith("lists_")}
    said = f"budget {found.pop('budget')}: {Lists(**found)}"
    if "reads_on_chip" in values:
        said += f"; {values['reads_on_chip']:.1%} of the backward pass's records from on chip"
    return said
