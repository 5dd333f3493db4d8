"""The Gaussians of all ranks in one place, where one process is to show them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from bytesplat_ns.parallel.ranks import Ranks

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModel


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
