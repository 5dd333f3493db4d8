"""How the demo runs commands, and what it says when one fails."""

from __future__ import annotations

import sys

import pytest

from bytesplat_ns.demo import __main__ as command_line
from bytesplat_ns.demo.run import StepFailed, call, find_command


def test_output_is_passed_on(capfd):
    call([sys.executable, "-c", "print('training'); import sys; print('a warning', file=sys.stderr)"])
    out = capfd.readouterr().out
    assert out.startswith("$ ") and "\ntraining\n" in out and "a warning\n" in out


def test_a_failure_shows_exit_code_and_last_lines():
    script = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    with pytest.raises(StepFailed, match="exit code 3") as failure:
        call([sys.executable, "-c", script])
    assert "line 99" in str(failure.value) and "line 80" in str(failure.value) and "line 79" not in str(failure.value)


def test_a_missing_command_is_named():
    with pytest.raises(StepFailed, match="no-such-command was not found"):
        find_command("no-such-command")


def test_a_failed_step_ends_the_demo_with_an_error(monkeypatch, capsys):
    def failing(config):
        raise StepFailed("ns-train ended with exit code 1.")

    monkeypatch.setattr(command_line, "run", failing)
    monkeypatch.setattr(sys, "argv", ["demo", "run"])
    assert command_line.main() == 1
    assert "ns-train ended with exit code 1" in capsys.readouterr().err


def test_capture_alone_from_the_command_line(monkeypatch, tmp_path):
    options = ["--views", "2", "--width", "16", "--height", "12", "--points", "20", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["demo", "capture", str(tmp_path), *options])
    assert command_line.main() == 0
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == [
        "frame_00001.png",
        "frame_00002.png",
        "sparse_pc.ply",
        "transforms.json",
    ]
