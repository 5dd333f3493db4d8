"""Runs can be repeated and resumed to the last bit, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SAVE_EVERY, STEPS, Run, export, train

from bytesplat_ns.run.checkpoint import CheckpointError


def differences(a: Any, b: Any, name: str = "") -> list[str]:
    """Where two nested structures with tensors differ, be it in one bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in differences(a[key], b[key], f"{name}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [line for i, pair in enumerate(zip(a, b, strict=True)) for line in differences(*pair, f"{name}/{i}")]
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return [] if (torch.equal(a, b) if tensors else a == b) else [name]


def splat(run: Run, output: Path) -> bytes:
    """The PLY file of a run."""
    return (export("gaussian-splat", run, output) / "splat.ply").read_bytes()


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> bytes:
    """The PLY file of the uninterrupted run."""
    return splat(trained, tmp_path_factory.mktemp("exported"))


def assert_equal_ends(run: Run, trained: Run, exported: bytes) -> None:
    """Model, moments and density statistics after the last step, and the exported file, are those of ``trained``."""
    ours, theirs = run.checkpoint(STEPS - 1), trained.checkpoint(STEPS - 1)
    assert len(ours["pipeline"]["_model.ids"]) == len(theirs["pipeline"]["_model.ids"])
    assert differences(ours, theirs) == []
    assert splat(run, run.folder) == exported


def test_one_seed_gives_one_result_for_any_number_of_threads(trained, exported, capture, tmp_path):
    assert_equal_ends(train(capture, tmp_path, steps=STEPS), trained, exported)


def test_another_seed_gives_another_result(exported, capture, tmp_path):
    run = train(capture, tmp_path, "--machine.seed", "43", steps=STEPS)
    assert splat(run, run.folder) != exported


def test_a_resumed_run_ends_as_if_uninterrupted(trained, exported, capture, tmp_path, capsys):
    options = "--load-dir", str(trained.models), "--load-step", str(SAVE_EVERY)
    run = train(capture, tmp_path, *options, steps=STEPS)
    assert f"{SAVE_EVERY + 1} images seen" in " ".join(capsys.readouterr().out.split())
    steps = [line["step"] for line in run.metrics() if "loss" in line]
    assert steps == list(range(SAVE_EVERY + 2, STEPS + 1)), "no step twice, none beyond the configured total"
    assert_equal_ends(run, trained, exported)


def test_a_short_run_with_the_schedule_of_a_long_one_can_be_extended(trained, exported, capture, tmp_path):
    # It ends before the first opacity reset, which a run that ends soon afterwards leaves out.
    part = train(capture, tmp_path / "part", "--pipeline.model.schedule-length", str(STEPS), steps=30)
    path = part.models / "step-000000029.ckpt"
    run = train(capture, tmp_path / "whole", "--load-checkpoint", str(path), steps=STEPS)
    assert_equal_ends(run, trained, exported)


def test_rounds_of_several_views_go_on_within_an_epoch(capture, tmp_path, capsys):
    """As they would have; or with rounds of another size, of the views that are left."""
    views = "--pipeline.datamanager.views-per-round"
    keep = "--steps-per-save", "1", "--save-only-latest-checkpoint", "False"
    whole = train(capture, tmp_path / "whole", views, "4", *keep, steps=20)
    last, saved = max(whole.models.glob("step-*.ckpt")), torch.load(whole.models / "step-000000001.ckpt")
    seen = saved["pipeline"]["_model._extra_state"]["images_seen"]
    resume = "--load-dir", str(whole.models), "--load-step", "1"
    again = train(capture, tmp_path / "again", views, "4", *resume, steps=20)
    assert (again.models / last.name).read_bytes() == last.read_bytes()
    assert "Rounds had" not in capsys.readouterr().out
    other = train(capture, tmp_path / "other", views, "1", *resume, steps=20)
    assert "Rounds had 4 views so far and have 1 from here on" in " ".join(capsys.readouterr().out.split())
    assert [line["images"] for line in other.metrics() if "loss" in line] == list(range(seen + 1, 21))


def test_training_a_finished_run_is_refused(trained, capture, tmp_path):
    message = f"has seen {STEPS} of {STEPS // 2} images.*--max-num-iterations"
    with pytest.raises(CheckpointError, match=message):
        train(capture, tmp_path, "--load-dir", str(trained.models), steps=STEPS // 2)
