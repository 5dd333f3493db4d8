"""How long buffers are made whose used length only the device knows."""

from __future__ import annotations

import torch

from bytesplat_ns.ops.cuda.buffers import Capacity

DEVICE = torch.device("cpu")


def test_lengths_are_few_and_have_room_to_spare() -> None:
    lengths = set()
    for needed in range(300_000, 1_200_000, 1_000):
        capacity = Capacity(2**31, "things")
        capacity.learn(DEVICE, needed)
        assert 1.25 * needed <= capacity(DEVICE) <= 1.25 * 1.25 * needed
        lengths.add(capacity(DEVICE))
    assert len(lengths) <= 10


def test_a_large_count_is_forgotten_slowly() -> None:
    capacity = Capacity(2**31, "things")
    capacity.learn(DEVICE, 1_000_000)
    for _ in range(50):  # an epoch of cheaper views
        capacity.learn(DEVICE, 400_000)
    assert capacity(DEVICE) >= 1_000_000
    for _ in range(2_000):
        capacity.learn(DEVICE, 400_000)
    assert capacity(DEVICE) <= 1.25 * 1.25 * 400_000
