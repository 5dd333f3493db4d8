"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of the photos and splats that are not part of the project; the test is skipped where it is missing."""
    named = os.environ.get("BYTESPLAT_TEST_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set BYTESPLAT_TEST_DATA to the folder that holds fox_tiny")
    return folder
