"""Gradient rows between ranks: what is not zero comes back bit by bit, and nothing else travels."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.ops.layout import EncodedRows, mask_words

PHOTOMETRIC = tuple(range(9))
PARTS = {
    "empty": [0, 0, 0],
    "one_row": [1],
    "whole_words": [64, 256, 32],
    "odd": [0, 33, 700, 0, 1, 2500, 0],
    "chunks": [5000, 2049],
}


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def rows_with_zeros(count: int, width: int, share: float) -> Tensor:
    """Random rows, a share of them zero but for what is beyond the bits of zero: see below."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, width, generator=generator)
    rows[torch.rand(count, generator=generator) < share] = 0
    return rows


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [PHOTOMETRIC, (*PHOTOMETRIC, 10, 11), tuple(range(14))], ids=len)
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_there_and_back(
    backend: Backend, parts: list[int], share: float, columns: tuple[int, ...], precision: torch.dtype
) -> None:
    width = 10 if columns == PHOTOMETRIC else 14
    rows = rows_with_zeros(sum(parts), width, share)
    encoded = backend.encode_rows(rows, parts, columns, precision)

    travelling = rows[:, list(columns)]
    left = (travelling != 0).any(1)
    travelling = travelling.to(precision)
    counts = [int(part.sum()) for part in left.split(parts)]
    assert encoded.counts.tolist() == counts
    for mask, part in zip(encoded.mask.split(mask_words(parts)), left.split(parts), strict=True):
        words = [sum(1 << i for i, bit in enumerate(word) if bit) for word in part.split(32)] if len(part) else []
        assert [word % 2**32 for word in mask.tolist()] == words
    assert torch.equal(bits(encoded.rows[: sum(counts)]), bits(travelling[left]))

    # Only the rows that are left arrive.
    arrived = EncodedRows(encoded.mask, encoded.rows[: sum(counts)].contiguous(), encoded.counts)
    decoded = backend.decode_rows(arrived, parts, columns, width)
    expected = torch.zeros_like(rows)
    expected[:, list(columns)] = travelling.float()
    assert decoded.shape == rows.shape and torch.equal(bits(decoded), bits(expected))


def test_columns_and_parts_that_rows_do_not_have() -> None:
    for parts, columns in ([4, 1], (0, 10)), ([4, 2], (0, 9)), ([5], (-1, 3)):
        with pytest.raises(ValueError, match=r"Rows \[5, 10\] have no columns"):
            ops.encode_rows(torch.zeros(5, 10), parts, columns)


def test_zero_means_its_bits(backend: Backend) -> None:
    """Minus zero, NaN and the smallest number travel; columns that do not are not asked."""
    rows = torch.zeros(6, 14)
    rows[0, 3], rows[1, 0], rows[2, 8] = -0.0, float("nan"), 1e-45
    rows[3, 9], rows[4, 13] = 1.0, float("inf")  # depth and statistics stay at home
    encoded = backend.encode_rows(rows, [6], PHOTOMETRIC)
    assert encoded.mask.tolist() == [0b111] and encoded.counts.tolist() == [3]
    decoded = backend.decode_rows(encoded, [6], PHOTOMETRIC, 14)
    assert torch.equal(bits(decoded[:3]), bits(rows[:3])) and not bits(decoded[3:]).any()


def test_bfloat16_is_the_nearest(backend: Backend) -> None:
    """Within 2^-8 of the number wherever that is normal, ties to even; what is not finite stays so."""
    generator = torch.Generator().manual_seed(7)
    magnitudes = 2.0 ** torch.randint(-100, 100, (3000, 9), generator=generator)
    rows = torch.zeros(3001, 10)
    rows[:3000, :9] = torch.randn(3000, 9, generator=generator) * magnitudes
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-23])
    rows[3000, :9] = torch.cat([halfway, torch.tensor([3.4e38, -float("inf"), float("nan"), 1e-45, -0.0])])
    encoded = backend.encode_rows(rows, [3001], PHOTOMETRIC, torch.bfloat16)
    decoded = backend.decode_rows(encoded, [3001], PHOTOMETRIC, 10)
    assert decoded.dtype == torch.float32 and not decoded[:, 9].any()
    error = (decoded - rows)[:3000, :9].abs() / rows[:3000, :9].abs()
    assert 0.9 * 2**-8 < error.max() <= 2**-8
    expected = [1.0, 1 + 2**-6, -1.0, 1 + 2**-7, float("inf"), -float("inf"), float("nan"), 0.0, -0.0]
    torch.testing.assert_close(decoded[3000, :9], torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
