"""Records of a tile that stay on chip, by the limits that NVIDIA documents for its GPUs."""

from __future__ import annotations

import pytest
import torch

from bytesplat_ns.ops import residency
from bytesplat_ns.ops.nvrtc import SharedMemory

KIB = 1024
CPU, GPU = torch.device("cpu"), torch.device("cuda", 7)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A GPU of some capability and KiB of shared memory a multiprocessor."""
    capability, shared = request.param
    monkeypatch.setattr(residency, "capability", lambda device: capability)
    monkeypatch.setattr(residency, "multiprocessors", lambda device: 100)
    monkeypatch.setattr(residency, "shared_memory", lambda device: SharedMemory(shared * KIB, 48 * KIB, KIB))
    residency.budget.cache_clear()
    yield
    residency.budget.cache_clear()


@pytest.mark.parametrize(
    "gpu, blocks, plain, with_statistics",
    [
        (((8, 0), 164), (4, 4), 165, 117),
        (((8, 6), 100), (4, 3), 63, 67),
        (((9, 0), 228), (6, 6), 145, 97),
        (((10, 0), 228), (4, 4), 215, 167),
    ],
    indirect=["gpu"],
)
def test_the_rule(gpu: None, blocks: tuple[int, int], plain: int, with_statistics: int) -> None:
    rooms = [residency.budget(GPU, statistics, exact=False) for statistics in (False, True)]
    assert tuple(room.blocks for room in rooms) == blocks
    assert [room.records for room in rooms] == [plain, with_statistics]
    assert rooms[0].resident == 100 * blocks[0]
    assert all(room.records + residency.GROUP - 1 >= residency.FEWEST_SLOTS for room in rooms)
    assert residency.residency_budget(GPU) == plain, "pruning makes tiles fit what the kernel keeps"


def test_no_block_gets_more_than_it_may_have() -> None:
    plenty, few = (SharedMemory(multiprocessor * KIB, 48 * KIB, KIB) for multiprocessor in (4000, 4 * 49))
    assert residency.slots_for(plenty, 4, False, False) == residency.slots_for(few, 4, False, False)


def test_a_cpu_has_none() -> None:
    assert residency.residency_budget(CPU) is None
