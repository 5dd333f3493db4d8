"""The Gaussians of all ranks in one place, where one process is to read or to show them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.parallel.ranks import Ranks

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModel

ROWS_AT_ONCE = 1 << 18
"""Rows that each rank sends in one go: 45 MiB of the widest table."""


@dataclass
class Tables:
    """Every table of Gaussians, rows in the order of ids."""

    parameters: dict[str, Tensor]
    ids: Tensor
    columns: dict[str, Tensor]


def collect(store: GaussianStore, ranks: Ranks) -> Tables | None:
    """All ranks' tables in the first rank's host memory; None on the others. No device ever holds them."""
    counts = ranks.gather(torch.tensor([len(store)], device=ranks.device)).tolist()
    ids = _collect(store.ids, counts, ranks)
    order = None if ids is None else ids.argsort()

    def sorted_rows(table: Tensor) -> Tensor:
        whole = _collect(table.detach(), counts, ranks)
        return table if whole is None else whole[order]

    parameters = {name: sorted_rows(table) for name, table in store.parameters.items()}
    columns = {name: sorted_rows(table) for name, table in store.columns.items()}
    return None if ids is None else Tables(parameters, ids[order], columns)


def _collect(table: Tensor, counts: list[int], ranks: Ranks) -> Tensor | None:
    """The rows of all ranks, which have so many, on the first."""
    parts: list[list[Tensor]] = [[] for _ in counts]
    for first in range(0, max(*counts, 1), ROWS_AT_ONCE):
        rows = table[first : first + ROWS_AT_ONCE].contiguous()
        received = ranks.exchange([rows] + [rows[:0]] * (ranks.size - 1), "checkpoint")
        for part, more in zip(parts, received, strict=True):
            part.append(more.cpu())
    return torch.cat([rows for part in parts for rows in part]) if ranks.rank == 0 else None


@contextmanager
def shown(model: ByteSplatModel, ranks: Ranks) -> Iterator[None]:
    """Within its block, every rank's model has the Gaussians of all ranks, to be looked at and not to be changed."""
    if ranks.size == 1:
        yield
        return
    own, own_ids = dict(model.gauss_params.items()), model.ids
    ids, order = ranks.gather(own_ids, "evaluation").sort()
    try:
        for name, parameter in own.items():
            model.gauss_params[name] = nn.Parameter(ranks.gather(parameter.detach(), "evaluation")[order])
        model.ids = ids
        yield
    finally:
        for name, parameter in own.items():
            model.gauss_params[name] = parameter
        model.ids = own_ids
