"""What stores hold, compared row by row; and strategies that work on several ranks at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bytesplat_ns.density.base import Gather
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops.layout import Gaussians


def by_id(*stores: GaussianStore) -> dict[str, Tensor]:
    """All rows of some stores, ordered by id: parameters, columns, ids."""
    order = torch.cat([store.ids for store in stores]).argsort()
    tables = {name: [store.parameters[name].detach() for store in stores] for name in Gaussians.PARAMETERS}
    tables |= {name: [store.columns[name] for store in stores] for name in stores[0].columns}
    tables["ids"] = [store.ids for store in stores]
    return {name: torch.cat(parts)[order] for name, parts in tables.items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def on_ranks(stores: list[GaussianStore], act: Callable[[GaussianStore, Gather], Any]) -> list[Any]:
    """Calls ``act`` for all stores at once, a thread for each rank, and returns what it returned on each."""
    barrier, slots, results = threading.Barrier(len(stores)), [None] * len(stores), [None] * len(stores)

    def work(rank: int) -> None:
        def gather(rows: Tensor) -> Tensor:
            slots[rank] = rows
            barrier.wait(timeout=60)
            everything = torch.cat(slots)
            barrier.wait(timeout=60)
            return everything

        try:
            results[rank] = act(stores[rank], gather)
        finally:
            if results[rank] is None:
                barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
