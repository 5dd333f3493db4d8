"""Ranks that are killed while they write a checkpoint of shards lose at most that one, and end as if uninterrupted."""

from __future__ import annotations

from pathlib import Path

from fork_server import ForkServer
from ns_train import Run

from bytesplat_ns.parallel import checkpoint
from bytesplat_ns.run.checkpoint import latest

IMAGES, VIEWS, SAVED_EVERY = 72, 2, 3

LIVES = [  # when, who of so many ranks, and whether the checkpoint is there
    ("in the shard", [1], 2, False),
    ("in the shard", [0, 1, 2], 3, False),
    ("in the index", [0], 2, False),
    ("once the index has its name", [0], 3, True),
    ("while the former one is removed", [0], 2, True),
]


def words(run: Run, ranks: int, *options: object) -> list[str]:
    """Of a run that goes on with what there is."""
    fixed = "--machine.num-devices", ranks, "--pipeline.datamanager.views-per-round", VIEWS
    resume = () if not run.models.exists() else ("--load-dir", run.models)
    return run.words(*fixed, "--steps-per-save", SAVED_EVERY, *resume, *options, steps=IMAGES)


def test_killed_while_shards_are_written(server: ForkServer, small_capture: Path, tmp_path: Path):
    run, whole = Run(small_capture, tmp_path / "killed"), 0
    for moment, culprits, ranks, done in LIVES:
        former = latest(run.models)
        again = words(run, ranks, "--checkpoint-files", "shards")
        child = server.start("killed_while_saving", moment, culprits, *again)
        assert child.end(180) == 1 and "ended by SIGKILL" in child.output, child.output
        assert former is None or f"{VIEWS * (whole + 1)} images seen" in " ".join(child.output.split()), child.output
        whole += SAVED_EVERY * (1 + done)
        last = latest(run.models)
        assert last == run.models / f"step-{whole:09d}.ckpt", moment
        assert checkpoint.read(last)["step"] == whole, "all of its shards are there"

    alone = Run(small_capture, tmp_path / "alone")
    assert server.start("ns_train", *words(alone, 1)).end(180) == 0
    final = server.start("ns_train", *words(run, 4))
    assert final.end(180) == 0, final.output
    ours, theirs = (list(left.models.iterdir()) for left in (run, alone))
    assert [path.name for path in ours] == [path.name for path in theirs], "what was left behind is gone"
    assert ours[0].read_bytes() == theirs[0].read_bytes()
