from __future__ import annotations

import pytest
import torch

from bytesplat_ns.density import philox

# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, result.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter, key, result):
    words = philox.philox4x32(tuple(torch.tensor(word) for word in counter), key)
    assert tuple(int(word) for word in words) == result


@pytest.mark.parametrize("draw", [philox.uniform, philox.normal])
def test_numbers_belong_to_the_id(draw):
    ids = torch.tensor([7, 0, 2**33 + 7, 123456789])
    numbers = draw(ids, 6, seed=42, step=100)
    shuffled = draw(ids.flip(0), 6, seed=42, step=100)
    assert torch.equal(numbers, shuffled.flip(0))
    assert torch.equal(numbers[:, :3], draw(ids, 3, seed=42, step=100)), "drawing fewer changes none"
    assert len(numbers.flatten().unique()) == numbers.numel(), "ids and draws differ, the upper word counts too"
    for other in (draw(ids, 6, seed=43, step=100), draw(ids, 6, seed=42, step=101)):
        assert not torch.isclose(numbers, other).any()


def test_distributions():
    ids = torch.arange(100_000)
    uniform = philox.uniform(ids, 2, seed=1, step=2).double()
    normal = philox.normal(ids, 3, seed=1, step=2).double()
    assert uniform.min() >= 0 and uniform.max() < 1
    # Standard errors of these moments are below 1.2e-3, 3e-4, 2e-3, 2.6e-3 and 9e-3; five of them are allowed.
    assert abs(uniform.mean() - 0.5) < 5e-3
    assert abs(uniform.var() - 1 / 12) < 1.5e-3
    assert abs(normal.mean()) < 1e-2
    assert abs(normal.var() - 1) < 1.3e-2
    assert abs((normal**4).mean() - 3) < 4.5e-2 * 2
    correlations = torch.corrcoef(normal.T) - torch.eye(3)
    assert correlations.abs().max() < 5 / 100_000**0.5


def test_no_ids():
    assert philox.uniform(torch.empty(0, dtype=torch.int64), 3, seed=0, step=0).shape == (0, 3)
    assert philox.normal(torch.empty(0, dtype=torch.int64), 3, seed=0, step=0).shape == (0, 3)
