"""Checkpoints of many ranks: each writes its own Gaussians; any number of ranks reads them.

A checkpoint of one file holds all Gaussians in the order of their ids, the same whatever the number of ranks was. One
of shards has a file with the rows of each rank, and in place of the one file an index: all the rest, with the names of
the shards. Shards are written under names that nothing refers to until the index is there, which is the moment at
which the checkpoint exists. No process ever holds more than its own rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Gaussians
from bytesplat_ns.parallel.partition import divide
from bytesplat_ns.parallel.ranks import ALONE, Ranks
from bytesplat_ns.run import checkpoint
from bytesplat_ns.run.checkpoint import CheckpointError

PARAMETER = "_model.gauss_params."
IDS = "_model.ids"

BLOCK = 1 << 18
"""Rows that are looked at together."""


class Rows(Mapping[str, Tensor]):
    """Tables with a row per Gaussian, spread over files, as if they were whole and in the order of ids.

    Nothing is read before it is asked for; ``rows[name]`` reads a whole table.
    """

    def __init__(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        """Tables by name of each file, among them ``ids``; they may be memory-mapped."""
        self._files = files
        ids = torch.cat([file["ids"] for file in files])
        counts = torch.tensor([len(file["ids"]) for file in files])
        self._file = torch.arange(len(files), dtype=torch.int32).repeat_interleave(counts)
        self._row = torch.cat([torch.arange(int(count)) for count in counts])
        if not (ids[1:] > ids[:-1]).all():
            order = ids.argsort()
            ids, self._file, self._row = ids[order], self._file[order], self._row[order]
        self.ids = ids  # [N] int64, rising

    def __len__(self) -> int:  # of the mapping: tables
        return len(self._files[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files[0])

    def __getitem__(self, name: str) -> Tensor:
        return self.take(torch.arange(self.count), [name])[name]

    @property
    def count(self) -> int:
        """Gaussians."""
        return len(self.ids)

    @property
    def files(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> torch.Size:
        """Of one row."""
        return self._files[0][name].shape[1:]

    def of_file(self, number: int) -> Tensor:
        """[n] int64, positions of the rows of one file."""
        return (self._file == number).nonzero().squeeze(1)

    def take(self, positions: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The rows at positions [n] int64 of some tables; of all by default."""
        file, row = self._file[positions], self._row[positions]
        places = [(file == number).nonzero().squeeze(1) for number in range(len(self._files))]
        result = {}
        for name in self if names is None else names:
            table = self._files[0][name].new_empty(len(positions), *self.shape(name))
            for place, tables in zip(places, self._files, strict=True):
                table[place] = tables[name][row[place]]
            result[name] = table
        return result

    def blocks(self, names: Sequence[str] | None = None) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """All rows, some at a time, and where they are."""
        for first in range(0, self.count, BLOCK):
            where = slice(first, min(first + BLOCK, self.count))
            yield where, self.take(torch.arange(where.start, where.stop), names)


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint of this method without anything that has a row per Gaussian, and those tables."""
    pipeline, section = dict(state["pipeline"]), dict(state["bytesplat"])
    gaussians = dict(section["gaussians"])
    tables = {name: pipeline.pop(PARAMETER + name) for name in Gaussians.PARAMETERS}
    tables |= gaussians.pop("columns") | {"ids": gaussians.pop("ids")}
    pipeline.pop(IDS, None)
    return {**state, "pipeline": pipeline, "bytesplat": section | {"gaussians": gaussians}}, tables


def join(state: Mapping[str, Any], tables: Mapping[str, Tensor]) -> dict[str, Any]:
    """What ``split`` has taken apart."""
    parameters = {PARAMETER + name: tables[name] for name in Gaussians.PARAMETERS}
    columns = {name: table for name, table in tables.items() if name not in (*Gaussians.PARAMETERS, "ids")}
    gaussians = state["bytesplat"]["gaussians"] | {"ids": tables["ids"], "columns": columns}
    return {
        **state,
        "pipeline": state["pipeline"] | parameters | {IDS: tables["ids"]},
        "bytesplat": state["bytesplat"] | {"gaussians": gaussians},
    }


# Writing ----------------------------------------------------------------------------------------------------------


def write(path: Path, state: Mapping[str, Any], ranks: Ranks, shards: bool) -> None:
    """Writes the checkpoint of all ranks, whole or not at all: at ``path`` one file, or an index of shards beside it.

    Args:
        state: what the checkpoint of one process would hold, with this rank's Gaussians. All ranks call together.

    Raises:
        CheckpointError: on all ranks, if one could not write.
    """
    rest, tables = split(state)
    if shards:
        _write_shards(path, rest, tables, ranks)
        return
    whole = collect(tables, ranks)
    _together(ranks, lambda: None if whole is None else checkpoint.write(path, join(rest, whole)))


def fit_one_file(tables: Mapping[str, Tensor], ranks: Ranks) -> bool:
    """Whether one process could work with all Gaussians: they fit the first rank's device, and half of the memory that
    its host has free."""
    if ranks.size == 1:
        return True
    device = ranks.device
    limit = psutil.virtual_memory().available // 2
    if device.type == "cuda":
        limit = min(limit, torch.cuda.get_device_properties(device).total_memory)
    own = torch.tensor([[sum(table.nbytes for table in tables.values()), limit]], device=device)
    everyone = ranks.gather(own)
    return bool(everyone[:, 0].sum() <= everyone[0, 1])


def collect(tables: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor] | None:
    """All ranks' tables in the order of ids, in the first rank's host memory (no device holds them); None elsewhere."""
    if ranks.size == 1:
        return dict(tables)
    counts = ranks.gather(torch.tensor([len(tables["ids"])], device=ranks.device)).tolist()
    ids = _collect(tables["ids"], counts, ranks)
    order = None if ids is None else ids.argsort()
    whole = {}
    for name, table in tables.items():
        rows = _collect(table, counts, ranks)
        if rows is not None:
            whole[name] = rows[order]
    return whole or None


def _collect(table: Tensor, counts: list[int], ranks: Ranks) -> Tensor | None:
    """The rows of all ranks, which have so many, on the first."""
    parts: list[list[Tensor]] = [[] for _ in counts]
    for first in range(0, max(*counts, 1), BLOCK):
        rows = table[first : first + BLOCK].contiguous()
        received = ranks.exchange([rows] + [rows[:0]] * (ranks.size - 1), "checkpoint")
        for part, more in zip(parts, received, strict=True):
            part.append(more.cpu())
    return torch.cat([rows for part in parts for rows in part]) if ranks.rank == 0 else None


def _write_shards(path: Path, rest: dict[str, Any], tables: dict[str, Tensor], ranks: Ranks) -> None:
    mark = ranks.broadcast(secrets.token_hex(4))
    names = [checkpoint.shard_name(path, mark, rank) for rank in range(ranks.size)]
    own = path.with_name(names[ranks.rank])
    counts = ranks.gather(torch.tensor([len(tables["ids"])], device=ranks.device)).tolist()
    rest["bytesplat"]["shards"] = dict(zip(names, counts, strict=True))
    try:
        _together(ranks, lambda: checkpoint.write_shard(own, tables))
        _together(ranks, lambda: checkpoint.write(path, rest) if ranks.rank == 0 else None)
    except CheckpointError:
        with suppress(OSError):
            own.unlink()
        raise


def remove_others(path: Path, ranks: Ranks) -> None:
    """Deletes the other checkpoints in the folder of ``path``, and what interrupted writes left behind.

    Raises:
        CheckpointError: on all ranks, if something cannot be deleted.
    """
    _together(ranks, lambda: checkpoint.remove_others(path) if ranks.rank == 0 else None)


def _together(ranks: Ranks, act: Callable[[], None]) -> None:
    """Writes, or reads, on every rank; all raise what the first of them that failed has to say."""
    trouble = None
    try:
        act()
    except CheckpointError as error:
        trouble = str(error)
    trouble = ranks.agree(trouble)
    if trouble is not None:
        raise CheckpointError(trouble)


# Reading ----------------------------------------------------------------------------------------------------------


def read(path: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """A checkpoint of this method with the Gaussians of this rank, in the order of ids; on one rank, of all.

    Ranks of the number that wrote the shards have each its own again. Others find new cells, of equal numbers.

    Raises:
        CheckpointError: the file or a shard is missing, damaged or of another kind.
    """
    found: list[tuple[dict[str, Any], Rows]] = []
    _together(ranks, lambda: found.append(open_rows(path)))
    ((rest, rows),) = found
    return join(rest, rows.take(own_rows(rows, ranks)))


def read_model(path: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """What is rendered of a checkpoint: the pipeline's state with the Gaussians of this rank; raises as ``read``."""
    found: list[tuple[dict[str, Any], Rows]] = []
    _together(ranks, lambda: found.append(open_rows(path)))
    ((rest, rows),) = found
    tables = rows.take(own_rows(rows, ranks), (*Gaussians.PARAMETERS, "ids"))
    return rest["pipeline"] | {PARAMETER + name: tables[name] for name in Gaussians.PARAMETERS} | {IDS: tables["ids"]}


def own_rows(rows: Rows, ranks: Ranks) -> Tensor:
    """[n] int64, positions of the Gaussians that a rank is to have, rising."""
    if rows.files == ranks.size:
        return rows.of_file(ranks.rank)
    if ranks.size == 1:
        return torch.arange(rows.count)
    share = torch.arange(rows.count * ranks.rank // ranks.size, rows.count * (ranks.rank + 1) // ranks.size)
    part = {name: table.to(ranks.device) for name, table in rows.take(share, ["means", "ids"]).items()}
    cells = divide(ranks.size, part["means"], part["ids"], torch.ones_like(part["ids"]), ranks)
    own = [
        (cells.owners(block["means"], block["ids"]) == ranks.rank).nonzero().squeeze(1) + where.start
        for where, block in rows.blocks(["means", "ids"])
    ]
    return torch.cat(own) if own else torch.arange(0)


def open_rows(path: Path) -> tuple[dict[str, Any], Rows]:
    """A checkpoint of this method, of one file or of shards, without its Gaussians, and these, not yet read."""
    state = checkpoint.read(path)
    section = dict(state["bytesplat"])
    shards: dict[str, int] | None = section.pop("shards", None)
    if shards is None:
        rest, tables = split(state)
        return rest, Rows([tables])
    return {**state, "bytesplat": section}, Rows([_open_shard(path, name, count) for name, count in shards.items()])


def _open_shard(index: Path, name: str, count: int) -> dict[str, Tensor]:
    path = index.with_name(name)
    if not path.is_file():
        raise CheckpointError(
            f"{index} is an index of shards, and its shard {path} is missing: put all into one folder."
        )
    tables = checkpoint.load(path)
    if len(tables["ids"]) != count:
        raise CheckpointError(f"{path} holds {len(tables['ids'])} Gaussians, but its index {index} says {count}.")
    return tables
