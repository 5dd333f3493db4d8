"""Gradient rows between ranks: what is bitwise zero stays at home."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layout import EncodedRows, mask_words
from .stage import stage

WORD = 32


@stage
def encode_rows(
    rows: Tensor, parts: Sequence[int], columns: Sequence[int], precision: torch.dtype = torch.float32
) -> EncodedRows:
    """Leaves out the rows that are zero in all columns that travel. Minus zero is not zero: no bit is lost.

    Args:
        rows: [M, W] gradient rows, part after part.
        parts: rows of each part, M in all.
        columns: those that travel, ascending.
        precision: bfloat16 rounds what travels to the nearest, ties to even: by 2^-8 of a normal number at most, which
            stays finite up to 3.38e38. Rows that become zero only thereby travel too.
    """
    travelling = rows[:, list(columns)].contiguous()
    left = (travelling.view(torch.int32) != 0).any(1)
    lefts = left.split(list(parts))
    mask = torch.cat([_words(part) for part in lefts])
    return EncodedRows(mask, travelling[left].to(precision), torch.stack([part.sum() for part in lefts]))


@stage
def decode_rows(encoded: EncodedRows, parts: Sequence[int], columns: Sequence[int], width: int) -> Tensor:
    """The rows [M, width] from which ``encoded`` came, part after part; zero in the columns that did not travel."""
    masks = encoded.mask.split(mask_words(parts))
    left = torch.cat([_bits(mask)[:part] for mask, part in zip(masks, parts, strict=True)])
    rows = torch.zeros(sum(parts), width, device=left.device)
    (kept,) = left.nonzero(as_tuple=True)
    rows[kept[:, None], torch.tensor(columns, device=rows.device)] = encoded.rows[: len(kept)].float()
    return rows


def _words(left: Tensor) -> Tensor:
    """A bit for each row [n] bool of a part."""
    bits = pad(left.long(), (0, -len(left) % WORD)).view(-1, WORD)
    return (bits << torch.arange(WORD, device=left.device)).sum(1).int()  # a set highest bit makes it negative


def _bits(words: Tensor) -> Tensor:
    """The reverse, with the bits to spare of the last word."""
    return (words[:, None] >> torch.arange(WORD, device=words.device) & 1).flatten().bool()
