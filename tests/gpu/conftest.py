"""Runs on a GPU, by the means of the tests of runs on the CPU (``tests/commands``)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bytesplat_ns.demo.capture import Capture, write_capture

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("commands", "parallel")]


@pytest.fixture(scope="session")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nerfstudio folder of 12 photos; 0, 4 and 8 are held out."""
    folder = tmp_path_factory.mktemp("capture")
    write_capture(folder, Capture(views=12, width=96, height=72, supersample=2, points=1500, workers=4))
    return folder
