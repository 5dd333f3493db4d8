"""Checkpoints that some ranks wrote, read by others."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import gaussians
from torch import Tensor

from bytesplat_ns.ops.layout import Gaussians
from bytesplat_ns.parallel import checkpoint
from bytesplat_ns.parallel.ranks import ALONE, Ranks
from bytesplat_ns.run.checkpoint import VERSION, CheckpointError

COUNT = 60
COLUMNS = {"means.exp_avg": (3,), "density.views": ()}


def state(rows: Tensor | slice = slice(None), degree: int = 1) -> dict[str, Any]:
    """What some ranks' trainers save; all else is the same on all of them."""
    scene = gaussians(COUNT, seed=5, degree=degree)
    order = scene.ids.argsort()[rows]
    ids = scene.ids[order]
    parameters = {f"_model.gauss_params.{name}": getattr(scene, name)[order] for name in Gaussians.PARAMETERS}
    columns = {name: ids.reshape(-1, *[1] * len(shape)).expand(-1, *shape) * 1.5 for name, shape in COLUMNS.items()}
    columns = {name: column.contiguous() for name, column in columns.items()}
    return {
        "step": 7,
        "pipeline": {"_model.device_indicator_param": torch.zeros(0), **parameters, "_model.ids": ids},
        "optimizers": {"camera_opt": {"state": {0: {"exp_avg": torch.ones(4, 6)}}}},
        "bytesplat": {"version": VERSION, "seed": 3, "gaussians": {"ids": ids, "next_id": 999, "columns": columns}},
    }


def part(ranks: Ranks, how: str) -> Tensor:
    """Rows of a rank: every so many, all on the last rank, or all on rank 0 and 1."""
    rows = torch.arange(COUNT)
    owner = {"spread": rows % ranks.size, "last": rows * 0 + ranks.size - 1, "two": rows % 2}[how]
    return (owner == ranks.rank).nonzero().squeeze(1)


def write(ranks: Ranks, folder: Path, shards: bool, how: str = "spread", degree: int = 1) -> None:
    checkpoint.write(folder / "step-000000007.ckpt", state(part(ranks, how), degree), ranks, shards)


def read(ranks: Ranks, path: Path) -> dict[str, Any]:
    rest, tables = checkpoint.split(checkpoint.read(path, ranks))
    return {"seed": rest["bytesplat"]["seed"], **{name: table.numpy() for name, table in tables.items()}}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_one_file_is_the_same_whatever_the_number_of_ranks(group, tmp_path):
    checkpoint.write(tmp_path / "1/step-000000007.ckpt", state(), ALONE, shards=False)
    for size, how in ((2, "spread"), (4, "spread"), (4, "last")):
        group(size)(write, tmp_path / f"{size}{how}", False, how)
        ours = (tmp_path / f"{size}{how}/step-000000007.ckpt").read_bytes()
        assert ours == (tmp_path / "1/step-000000007.ckpt").read_bytes()
    assert same(torch.load(tmp_path / "1/step-000000007.ckpt"), state()), "in the stock layout"


@pytest.mark.parametrize(("how", "degree"), [("spread", 1), ("last", 1), ("two", 0)])
def test_any_number_of_ranks_reads_what_another_wrote(group, tmp_path, how, degree):
    """Empty shards and empty tables included."""
    expected = checkpoint.split(state(degree=degree))[1]
    for shards in (False, True):
        folder = tmp_path / str(shards)
        group(3)(write, folder, shards, how, degree)
        assert len(list(folder.iterdir())) == 1 + 3 * shards
        path = folder / "step-000000007.ckpt"
        assert same(checkpoint.read(path), state(degree=degree))
        for size in (2, 3, 4):
            parts = group(size)(read, path)
            counts = [len(rows["ids"]) for rows in parts]
            assert all(rows.pop("seed") == 3 and (rows["ids"][1:] > rows["ids"][:-1]).all() for rows in parts)
            order = torch.cat([torch.from_numpy(rows["ids"]) for rows in parts]).argsort()
            for name, table in expected.items():
                assert torch.equal(torch.cat([torch.from_numpy(rows[name]) for rows in parts])[order], table), name
            if shards and size == 3:
                assert counts == [len(torch.arange(COUNT)[part(Ranks3(rank), how)]) for rank in range(3)]
            else:
                assert max(counts) - min(counts) <= 2, "cells of equal numbers"


class Ranks3:
    """Rank and size of one of three."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def fail_to_write(ranks: Ranks, folder: Path, culprit: int, at: str) -> str:
    """The disk of one rank is full while it writes its shard or the index."""
    stock = torch.save

    def full(value: Any, file: Any) -> None:
        if ranks.rank == culprit and (at == "index") == ("pipeline" in value):
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        stock(value, file)

    torch.save = full
    try:
        write(ranks, folder, shards=True)
    except CheckpointError as error:
        return str(error)
    finally:
        torch.save = stock
    return ""


def test_a_full_disk_on_one_rank_leaves_the_last_checkpoint_whole(group, tmp_path):
    group(3)(write, tmp_path, True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for culprit, at in ((0, "shard"), (2, "shard"), (0, "index")):
        (message,) = set(group(3)(fail_to_write, tmp_path, culprit, at))
        assert "No space left on device" in message and "Earlier checkpoints are untouched" in message
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert same(checkpoint.read(tmp_path / "step-000000007.ckpt"), state())


def test_shards_without_an_index_are_no_checkpoint_and_go_with_the_old_ones(group, tmp_path):
    """As killed ranks leave them."""
    group(3)(write, tmp_path, True)
    index, old = tmp_path / "step-000000007.ckpt", {path.name for path in tmp_path.iterdir()}
    index.rename(tmp_path / "step-000000003.ckpt")
    group(2)(write, tmp_path, True)
    (tmp_path / "shard-000000000.step-000000009.0a0b0c0d.rank-0000.pt").write_bytes(b"half")
    # As nerfstudio's tools find the latest step.
    steps = [int(name[name.find("-") + 1 : name.find(".")]) for name in os.listdir(tmp_path)]
    assert max(steps) == 7 and checkpoint.checkpoint.latest(tmp_path) == index
    checkpoint.remove_others(index, ALONE)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 3 and not left & (old - {index.name})
    assert same(checkpoint.read(index), state())


def read_error(ranks: Ranks, path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoint.read(path, ranks)
    return str(error.value)


def test_a_shard_that_is_missing_or_damaged_is_named_on_all_ranks(group, tmp_path):
    group(3)(write, tmp_path, True)
    index = tmp_path / "step-000000007.ckpt"
    first, second, _ = sorted(tmp_path.glob("shard-*"))
    first.rename(tmp_path / "aside")
    (message,) = set(group(2)(read_error, index))
    assert f"{first} is missing: put all into one folder" in message
    (tmp_path / "aside").rename(first)
    second.write_bytes(second.read_bytes()[:1000])
    assert second.name in read_error(ALONE, index)
    torch.save(checkpoint.split(state(slice(0, 3)))[1], second)
    assert f"{second} holds 3 Gaussians, but its index {index} says 20" in read_error(ALONE, index)


def test_one_file_is_the_default_while_a_process_could_hold_it(monkeypatch):
    tables = checkpoint.split(state())[1]
    assert checkpoint.fit_one_file(tables, ALONE)

    class Two(Ranks3):
        size, device = 2, torch.device("cpu")

        def gather(self, rows: Tensor) -> Tensor:
            return torch.cat([rows, rows])

    assert checkpoint.fit_one_file(tables, Two(0))
    monkeypatch.setattr(checkpoint.psutil, "virtual_memory", lambda: type("", (), {"available": 20_000}))
    assert not checkpoint.fit_one_file(tables, Two(0))
