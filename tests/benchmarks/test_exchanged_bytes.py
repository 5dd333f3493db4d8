"""What the benchmark of exchanged bytes counts: photos of a run, and views of a city."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import exchange
import pytest

from bytesplat_ns.demo.capture import Capture, write_capture


def test_bytes_are_those_of_rows_that_are_not_zero(tmp_path: Path) -> None:
    write_capture(tmp_path, Capture(views=9, width=48, height=40, supersample=1, points=300, workers=1))
    options = Namespace(data=[tmp_path], images=[7], city=[20_000], ranks=[2])
    run, street, air = exchange.cases(options)
    assert run["views"] == 7 and street["views"] == air["views"] == exchange.CITY_VIEWS
    for case in (run, street, air):
        boxes, records = case["box_visible_per_image"], case["records_per_image"]
        assert 0 < records <= boxes
        for name, (columns, precision) in exchange.ROWS.items():
            found, plain = case[name], exchange.PLAIN_BYTES[name]
            kept = records * (1 - found["zero_share_of_records"])
            assert found["row_bytes"] == len(columns) * precision.itemsize
            assert found["bytes_per_image"] == pytest.approx(found["row_bytes"] * kept + records / 8, rel=2e-3)
            assert found["saved"] == pytest.approx(1 - found["bytes_per_image"] / (plain * boxes), abs=2e-3)
    hidden = [case["gradients"]["zero_share_of_records"] for case in (street, air)]
    assert hidden[0] > hidden[1] > 0, "more is hidden from the street than from the air"
