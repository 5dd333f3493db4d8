"""A run of three ranks goes on with any number of them as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import torch
from fork_server import ForkServer
from ns_train import Run

from bytesplat_ns.parallel import checkpoint

STEPS, SAVED = 40, 19
"""The second is after the first refinement and within an epoch."""


def finish(server: ForkServer, run: Run, ranks: int, *options: object) -> Path:
    """Trains on so many ranks, with one view a round, as then rounds do not depend on ranks; the last checkpoint."""
    fixed = "--machine.num-devices", ranks, "--pipeline.datamanager.views-per-round", 1
    child = server.start("ns_train", *run.words(*fixed, *options, steps=STEPS))
    assert child.end(180) == 0, child.output
    return run.models / f"step-{STEPS - 1:09d}.ckpt"


def test_from_three_ranks_to_any_number(server: ForkServer, small_capture: Path, tmp_path: Path):
    whole = Run(small_capture, tmp_path / "whole")
    keep = "--checkpoint-files", "shards", "--steps-per-save", SAVED, "--save-only-latest-checkpoint", "False"
    last = finish(server, whole, 3, *keep)
    assert len(list(whole.models.glob("shard-*"))) == 3 * (STEPS // SAVED + 1)
    expected = checkpoint.split(checkpoint.read(last))[1]
    resume = "--load-dir", whole.models, "--load-step", SAVED
    one = finish(server, Run(small_capture, tmp_path / "1"), 1, *resume)
    four = finish(server, Run(small_capture, tmp_path / "4"), 4, *resume)
    two = finish(server, Run(small_capture, tmp_path / "2"), 2, *resume, "--checkpoint-files", "shards")
    assert one.read_bytes() == four.read_bytes(), "the same file whatever the number of ranks"
    assert [path.name for path in one.parent.iterdir()] == [one.name]
    for path in (one, two):
        tables = checkpoint.split(checkpoint.read(path))[1]
        assert tables.keys() == expected.keys()
        assert all(torch.equal(tables[name], table) for name, table in expected.items())
