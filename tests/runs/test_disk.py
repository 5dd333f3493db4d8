"""A full disk leaves earlier checkpoints whole, and does not end a run before its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytesplat_ns.run.progress import Progress

SMALL = 100_000
"""Bytes: less than a checkpoint takes, more than the other files of a run."""


def test_a_checkpoint_that_cannot_be_written_is_warned_of_and_tried_again(server, run):
    words = run.words("--steps-per-save", 3, "--save-only-latest-checkpoint", "False", steps=12)
    child = server.start("files_limited", 5, 8, SMALL, *words)
    assert child.end() == 0, child.output
    assert run.steps() == [3, 9, 11], "the one of step 6 did not fit"
    (warning,) = [line for line in child.output.splitlines() if "WARNING" in line]
    for words in ("step-000000006.ckpt", "File too large", "Earlier checkpoints are untouched", "Training goes on"):
        assert words in warning
    assert not list(run.models.glob("*.part"))


def test_the_last_checkpoint_must_be_written(server, run):
    words = run.words("--steps-per-save", 3, steps=8)
    child = server.start("files_limited", 5, 99, SMALL, *words)
    assert child.end() == 1
    *_, before, last = child.output.strip().splitlines()
    assert "CheckpointError: Could not write the checkpoint" in before and "step-000000003.ckpt" in before
    assert last.startswith("--load-dir")
    assert run.steps() == [3]
    words = run.words(steps=8)
    resumed = server.start("ns_train", words[0], "--load-dir", run.models, *words[1:])
    assert resumed.end() == 0 and run.steps() == [7], resumed.output


def test_a_report_that_cannot_be_written_is_left_out(capsys):
    progress = Progress(Path("/dev/full"), total_steps=3, first_step=0)
    progress.report(1, 1, 0.5, 20.0, 100)
    progress.report(2, 2, 0.5, 20.0, 100)
    progress.close()
    assert capsys.readouterr().out.count("WARNING: could not write to /dev/full") == 1


@pytest.mark.parametrize("room", [0, 10, 1000])
def test_reports_are_whole_or_absent(room, tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    progress = Progress(path, total_steps=3, first_step=1)

    class Disk:
        """Takes ``room`` bytes."""

        def __init__(self, file):
            self.fileno, self.close, self._write = file.fileno, file.close, file.write

        def write(self, line: bytes) -> int:
            return self._write(line[:room])

    monkeypatch.setattr(progress, "_file", Disk(progress._file))
    progress.write(step=2)
    progress.close()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == ([1, 2] if room == 1000 else [1])
