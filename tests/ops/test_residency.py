"""Records of a tile that stay on chip, by the limits that NVIDIA documents for its GPUs."""

from __future__ import annotations

import pytest
import torch

from bytesplat_ns.ops.residency import residency_budget, resident_records

KIB = 1024


@pytest.mark.parametrize(
    "capability, multiprocessor, records",
    [("8.0", 164, 853), ("8.6", 100, 512), ("8.9", 100, 512), ("9.0", 228, 1194), ("10.0", 228, 1194)],
)
def test_the_rule(capability: str, multiprocessor: int, records: int) -> None:
    assert resident_records(multiprocessor * KIB, (multiprocessor - 1) * KIB, KIB) == records


def test_no_block_gets_more_than_it_may_have() -> None:
    assert resident_records(400 * KIB, 48 * KIB, KIB) == KIB


def test_a_device() -> None:
    assert residency_budget(torch.device("cpu")) is None
    if torch.cuda.is_available():
        assert residency_budget(torch.device("cuda", 0)) > 100
