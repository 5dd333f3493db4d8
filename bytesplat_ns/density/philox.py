"""Random numbers that belong to a Gaussian: Philox4x32-10, a counter-based generator.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A number is a pure
function of (seed, step, id, draw): neither a Gaussian's row or rank nor what was drawn before matters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, as 32-bit fractions
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32.

    Args:
        counter: four int64 tensors of one shape with values in [0, 2^32).
        key: two integers in [0, 2^32).

    Returns:
        Four int64 tensors of that shape with values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which leaves the bits of the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _WORD) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32 & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _WORD, (k1 + _KEY_INCREMENTS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(ids: Tensor, draws: int, *, seed: int, step: int) -> Tensor:
    """Uniform float32 numbers in [0, 1), multiples of 2^-24.

    Args:
        ids: [n] int64 global ids.
        draws: numbers for each id.
        seed, step: integers in [0, 2^32).

    Returns:
        [n, draws] float32 on the device of the ids.
    """
    # The upper 24 bits, because a float32 holds no more: rounding could give 1.
    return (_words(ids, draws, seed, step) >> 8).float() * 2.0**-24


def normal(ids: Tensor, draws: int, *, seed: int, step: int) -> Tensor:
    """Standard normal float32 numbers [n, draws], by Box-Muller from the words that ``uniform`` takes.

    Arguments are those of ``uniform``.
    """
    # float64, so that devices whose logarithms and sines differ in the last bit still round to one float32.
    words = _words(ids, draws + draws % 2, seed, step).double()
    radius = (-2.0 * ((words[:, 0::2] + 1.0) * 2.0**-32).log()).sqrt()
    angle = words[:, 1::2] * (2.0 * math.pi * 2.0**-32)
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=2)
    return pairs.flatten(1)[:, :draws].float()


def _words(ids: Tensor, draws: int, seed: int, step: int) -> Tensor:
    """[n, draws] int64 in [0, 2^32): word d of an id is lane d % 4 of its counter block d // 4."""
    assert 0 <= seed <= _WORD and 0 <= step <= _WORD, "seed and step are the two 32-bit words of the key"
    blocks = torch.arange(-(-draws // 4), device=ids.device).expand(len(ids), -1)
    column = ids[:, None].expand_as(blocks)
    lanes = philox4x32((column & _WORD, column >> 32 & _WORD, blocks, torch.zeros_like(blocks)), (seed, step))
    return torch.stack(lanes, dim=2).flatten(1)[:, :draws]
