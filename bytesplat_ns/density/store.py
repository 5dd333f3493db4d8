"""The Gaussians that one rank owns, and everything that has a row per Gaussian.

Parameters, ids, Adam moments and the statistics of densification are tables of N rows that must stay aligned
while rows come and go. They are edited here and nowhere else: no other code has to know who keeps a table.

An edit leaves the rows in the order of their ids. Equal depths are blended in that order, and what is in order already
need not be sorted in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bytesplat_ns.ops.layout import Gaussians


class GaussianStore:
    """Rows of Gaussians.

    The parameters stay in their owner's ``nn.ParameterDict`` (``gauss_params`` of a Splatfacto model), whose
    entries are replaced when rows come or go. Build the store once they are on their device.

    Attributes:
        parameters: the six tensors of ``ops.layout.Gaussians.PARAMETERS``, each with N rows.
        ids: [N] int64, global and unique, kept for life.
        next_id: smallest id never used yet by any rank.
        columns: further tensors [N, ...] by name. Look them up again after an edit: it replaces them.
        settle: brings updates to the present that somebody has put off; called before rows are copied or saved.
    """

    def __init__(self, parameters: nn.ParameterDict, ids: Tensor | None = None, next_id: int | None = None) -> None:
        """Without ids, rows are numbered from zero. ``next_id`` must exceed the ids of all ranks."""
        self.parameters = parameters
        device = parameters["means"].device
        self.ids = torch.arange(len(self), device=device) if ids is None else ids.to(device)
        assert self.ids.shape == (len(self),), "one id for each row"
        if next_id is None:
            next_id = int(self.ids.max()) + 1 if len(self) else 0
        self.next_id = next_id
        self.columns: dict[str, Tensor] = {}
        self.settle: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self.parameters["means"].shape[0]

    @property
    def device(self) -> torch.device:
        return self.parameters["means"].device

    def gaussians(self) -> Gaussians:
        """The live parameters (not copies) as the stages take them."""
        return Gaussians(**{name: self.parameters[name] for name in Gaussians.PARAMETERS}, ids=self.ids)

    def register(self, name: str, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> None:
        """Add a column of zeros [N, *shape] that follows the rows from now on."""
        assert name not in self.columns, f"column {name} is registered twice"
        self.columns[name] = torch.zeros((len(self), *shape), dtype=dtype, device=self.device)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop all others: a mask [N] bool or indices [n] int64."""
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        self.edit(rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows, none, none, {})

    @torch.no_grad()
    def edit(self, kept: Tensor, parents: Tensor, ids: Tensor, changes: Mapping[str, Tensor]) -> None:
        """Keep some rows and append children of some, kept or not, in one pass over every table.

        A child starts as a copy of its parent's parameters and with zeros in every other column: without
        momentum and without history.

        Args:
            kept: [n] int64, rows that stay.
            parents: [m] int64, for each child the row it is copied from.
            ids: [m] int64, ids of the children.
            changes: [m, ...] by parameter name, what a child has instead of its parent's value.
        """
        self.settle()
        source = torch.cat([kept, parents])
        for name, old in list(self.parameters.items()):
            new = old.detach()[source]
            if name in changes:
                new[len(kept) :] = changes[name]
            self.parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)
        for name, old in self.columns.items():
            self.columns[name] = old[source]
            self.columns[name][len(kept) :] = 0
        self.ids = torch.cat([self.ids[kept], ids])
        self._sort()

    @torch.no_grad()
    def _sort(self) -> None:
        """Rows in the order of ids, which they usually are in already."""
        if (self.ids[1:] > self.ids[:-1]).all():
            return
        order = self.ids.argsort()
        for name, old in list(self.parameters.items()):
            self.parameters[name] = nn.Parameter(old.detach()[order], requires_grad=old.requires_grad)
        self.columns = {name: old[order] for name, old in self.columns.items()}
        self.ids = self.ids[order]

    def live(self) -> list[Tensor]:
        """The tensors that have a row per Gaussian, as they are now: others come in their place with every edit."""
        return [*self.parameters.values(), *self.columns.values(), self.ids]

    def tables(self) -> dict[str, Tensor]:
        """All that has a row per Gaussian: parameters (detached) and columns by name, and ``ids``."""
        parameters = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {**parameters, **self.columns, "ids": self.ids}

    def replace(self, tables: Mapping[str, Tensor]) -> None:
        """Hold these rows instead of those of now: tables with the names of ``tables()``, in any order of rows.

        Whoever takes rows away or brings them calls ``settle`` before it reads ``tables()``.
        """
        for name, old in list(self.parameters.items()):
            self.parameters[name] = nn.Parameter(tables[name], requires_grad=old.requires_grad)
        self.columns = {name: tables[name] for name in self.columns}
        self.ids = tables["ids"]
        self._sort()

    def state_dict(self) -> dict[str, Any]:
        """Ids and columns, row by row; the parameters are saved by their owner, in the same order."""
        self.settle()
        return {"ids": self.ids, "next_id": self.next_id, "columns": dict(self.columns)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ids and columns of the Gaussians whose parameters are there already, in the state's order.

        Raises:
            ValueError: the state has other columns or another number of rows than this run.
        """
        if state["columns"].keys() != self.columns.keys():
            raise ValueError(
                f"The checkpoint holds the per-Gaussian columns {sorted(state['columns'])}, this run needs "
                f"{sorted(self.columns)}: resume with the optimizer and density options it was trained with."
            )
        rows = {name: len(column) for name, column in state["columns"].items()} | {"ids": len(state["ids"])}
        wrong = {name: n for name, n in rows.items() if n != len(self)}
        if wrong:
            raise ValueError(
                f"There are {len(self)} Gaussians, but the checkpoint has columns of other lengths: {wrong}."
            )
        self.ids = state["ids"].to(self.device)
        self.next_id = state["next_id"]
        self.columns = {name: state["columns"][name].to(self.device) for name in self.columns}
        self._sort()
