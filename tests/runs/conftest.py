"""A small capture, and a server that starts runs of ``ns-train`` on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer
from ns_train import Run

from bytesplat_ns.demo.capture import Capture, write_capture


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("children")) as server:
        yield server


@pytest.fixture(scope="session")
def small_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nerfstudio folder of 8 photos; 0 and 4 are held out. Its name has a space."""
    folder = tmp_path_factory.mktemp("small capture")
    write_capture(folder, Capture(views=8, width=64, height=48, supersample=1, points=700, workers=1))
    return folder


@pytest.fixture
def run(small_capture: Path, tmp_path: Path) -> Run:
    return Run(small_capture, tmp_path / "my runs")
