"""The numbers that Python and C++ both know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bytesplat_ns.ops import layout

HEADER = Path(__file__).parents[2] / "csrc" / "common" / "layout.h"


@pytest.fixture(scope="module")
def constants() -> dict[str, float]:
    """The header's constexpr numbers by name."""
    if not HEADER.is_file():
        pytest.skip(f"no {HEADER}")
    found = re.findall(r"constexpr (?:int|float) (\w+) = ([^;]+);", HEADER.read_text())
    values: dict[str, float] = {}
    for name, expression in found:
        values[name] = eval(re.sub(r"(?<=[\d.])f\b", "", expression), None, dict(values))
    return values


def test_every_constant_has_its_twin(constants: dict[str, float]) -> None:
    for name, value in constants.items():
        ours = getattr(layout, name)
        ours = ours.start if isinstance(ours, slice) else ours
        assert value == ours, name


def test_no_column_is_missing(constants: dict[str, float]) -> None:
    columns = {
        name for name, value in vars(layout).items() if name.isupper() and isinstance(value, (int, float, slice))
    }
    assert columns == constants.keys()


def test_columns_fill_a_row() -> None:
    record = [layout.MEAN2D, layout.CONIC, layout.OPACITY, layout.RGB, layout.DEPTH]
    statistics = [layout.ABSGRAD, layout.IMPORTANCE, layout.MAX_CONTRIBUTION]

    def indices(columns: list[int | slice]) -> list[int]:
        return [i for c in columns for i in (range(c.start, c.stop) if isinstance(c, slice) else [c])]

    assert indices(record) == list(range(layout.RECORD_WIDTH)) == list(range(layout.ROW_WIDTH))
    assert indices(record + statistics) == list(range(layout.ROW_WIDTH_WITH_STATISTICS))
