"""A run of three ranks goes on with any number of them as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from ns_train import Run

from bytesplat_ns.parallel import checkpoint

IMAGES = 40


def finish(server: ForkServer, run: Run, ranks: int, views: int, *options: object) -> Path:
    """Trains on so many ranks with rounds of so many views; the last checkpoint."""
    fixed = "--machine.num-devices", ranks, "--pipeline.datamanager.views-per-round", views
    child = server.start("ns_train", *run.words(*fixed, *options, steps=IMAGES))
    assert child.end(180) == 0, child.output
    return max(run.models.glob("step-*.ckpt"))


@pytest.mark.parametrize(("views", "saved"), [(1, 19), (4, 6)])
def test_from_three_ranks_to_any_number(
    views: int, saved: int, server: ForkServer, small_capture: Path, tmp_path: Path
):
    """The checkpoint to go on from is of a step after the first refinement and within an epoch of six photos."""
    whole = Run(small_capture, tmp_path / "whole")
    keep = "--checkpoint-files", "shards", "--steps-per-save", saved, "--save-only-latest-checkpoint", "False"
    last = finish(server, whole, 3, views, *keep)
    assert len(list(whole.models.glob("shard-*"))) == 3 * len(list(whole.models.glob("step-*")))
    expected = checkpoint.split(checkpoint.read(last))[1]
    resume = "--load-dir", whole.models, "--load-step", saved
    one = finish(server, Run(small_capture, tmp_path / "1"), 1, views, *resume)
    four = finish(server, Run(small_capture, tmp_path / "4"), 4, views, *resume)
    two = finish(server, Run(small_capture, tmp_path / "2"), 2, views, *resume, "--checkpoint-files", "shards")
    assert one.name == two.name == four.name == last.name
    assert one.read_bytes() == four.read_bytes(), "the same file whatever the number of ranks"
    assert [path.name for path in one.parent.iterdir()] == [one.name]
    for path in (one, two):
        tables = checkpoint.split(checkpoint.read(path))[1]
        assert tables.keys() == expected.keys()
        assert all(torch.equal(tables[name], table) for name, table in expected.items())
