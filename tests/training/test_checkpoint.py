"""Checkpoint files are whole or absent, and load with torch's safe default."""

import errno
import sys

import numpy as np
import pytest
import torch

from bytesplat_ns.run import checkpoint
from bytesplat_ns.run.checkpoint import CheckpointError


def state(step: int) -> dict:
    return {"step": step, "pipeline": {"x": torch.arange(4)}, "bytesplat": {"version": checkpoint.VERSION}}


def test_round_trip_makes_numpy_scalars_loadable(tmp_path):
    path = checkpoint.path_for(tmp_path / "new", 7)
    checkpoint.write(path, state(7) | {"lr": np.float64(0.5), "nested": [{"a": np.int64(3)}]})
    read = checkpoint.read(path)
    assert read["lr"] == 0.5 and read["nested"] == [{"a": 3}]
    assert torch.equal(torch.load(path)["pipeline"]["x"], torch.arange(4))


def test_a_failed_write_leaves_the_previous_file_whole(tmp_path, monkeypatch):
    path = checkpoint.path_for(tmp_path, 7)
    checkpoint.write(path, state(7))
    before = path.read_bytes()

    def full(value, file):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*Earlier checkpoints are untouched"):
        checkpoint.write(path, state(8))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "nothing half-written stays behind"


def test_what_a_killed_write_leaves_is_not_the_latest_for_nerfstudio(tmp_path, monkeypatch):
    checkpoint.write(checkpoint.path_for(tmp_path, 7), state(7))
    monkeypatch.setattr(torch, "save", lambda *_: sys.exit())  # nothing is cleaned up
    with pytest.raises(SystemExit):
        checkpoint.write(checkpoint.path_for(tmp_path, 8), state(8))
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 2
    # As nerfstudio's tools find the latest step.
    assert max(int(name[name.find("-") + 1 : name.find(".")]) for name in names) == 7
    assert checkpoint.latest(tmp_path) == checkpoint.path_for(tmp_path, 7)


def test_a_folder_that_cannot_be_made_is_a_failed_write(tmp_path):
    (tmp_path / "models").write_text("a file")
    with pytest.raises(CheckpointError, match="Could not write the checkpoint"):
        checkpoint.write(checkpoint.path_for(tmp_path / "models", 7), state(7))


def test_an_old_checkpoint_that_cannot_be_deleted_is_named(tmp_path):
    (tmp_path / "step-000000001.ckpt").mkdir()
    checkpoint.write(checkpoint.path_for(tmp_path, 7), state(7))
    with pytest.raises(CheckpointError, match=r"000007.ckpt is written, but .*000001.ckpt cannot be deleted"):
        checkpoint.remove_others(checkpoint.path_for(tmp_path, 7))


def test_the_latest_or_the_named_step_is_found_and_others_are_removed(tmp_path):
    for step in (100, 20_000, 300):
        checkpoint.write(checkpoint.path_for(tmp_path, step), state(step))
    (tmp_path / "unfinished-000000000.part").write_bytes(b"interrupted")
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.find(tmp_path, None).name == "step-000020000.ckpt"
    assert checkpoint.find(tmp_path, 300).name == "step-000000300.ckpt"
    with pytest.raises(CheckpointError, match="holds steps 100, 300, 20000"):
        checkpoint.find(tmp_path, 5)
    checkpoint.remove_others(tmp_path / "step-000000300.ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000000300.ckpt"]


def test_what_is_not_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        checkpoint.read(tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match="is not a folder"):
        checkpoint.find(tmp_path / "none", None)
    with pytest.raises(CheckpointError, match="holds no file"):
        checkpoint.find(tmp_path, None)
    path = tmp_path / "step-000000001.ckpt"
    path.write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read(path)
    torch.save({"step": 1, "pipeline": {}}, path)
    with pytest.raises(CheckpointError, match="not a bytesplat checkpoint"):
        checkpoint.read(path)
    torch.save({"step": 1, "bytesplat": {"version": 999}}, path)
    with pytest.raises(CheckpointError, match="version 999"):
        checkpoint.read(path)


def test_how_to_resume(tmp_path):
    folder = tmp_path / "my models"
    assert "no checkpoint" in checkpoint.how_to_resume(folder, "ns-train bytesplat", [])
    checkpoint.write(checkpoint.path_for(folder, 7), state(7))
    text = checkpoint.how_to_resume(folder, "ns-train bytesplat", ["--load-step"])
    assert "step-000000007.ckpt" in text and "right after 'ns-train bytesplat', in place of --load-step" in text
    assert text.splitlines()[-1] == f"--load-dir '{folder}'"
