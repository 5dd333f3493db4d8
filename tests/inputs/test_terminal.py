"""Some of the inputs through the commands as a user starts them: what is to be done is the last line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from entry import Run, words
from scene import Scene


def run(folder: Path, command: str, *words: object) -> tuple[int, str]:
    """Exit code and last line of a command that was installed with this interpreter."""
    ended = subprocess.run(
        [Path(sys.executable).parent / command, *map(str, words)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCH_HOME": str(folder)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return ended.returncode, ended.stdout.rstrip().splitlines()[-1]


def test_an_unreadable_photo_is_named_last(tmp_path):
    scene = Scene(tmp_path / "two words")
    last = scene.nerfstudio()
    scene.photo(3).write_bytes(b"not a photo")
    code, line = run(tmp_path, "ns-train", *words(scene.folder, tmp_path, *last))
    assert code != 0
    assert f"PhotoError: Cannot read {scene.photo(3)}" in line and "Replace the file" in line


def test_no_held_out_photo_stops_the_evaluation_only(tmp_path):
    scene = Scene(tmp_path / "data", count=1)
    last = scene.nerfstudio("--eval-mode", "fraction")
    code, line = run(tmp_path, "ns-train", *words(scene.folder, tmp_path, *last))
    assert code == 0, line
    config = Run(tmp_path / "scene/bytesplat/run").config
    code, line = run(tmp_path, "ns-eval", "--load-config", config, "--output-path", tmp_path / "metrics.json")
    assert code != 0
    assert "No evaluation photos in" in line and "Check its eval mode" in line
