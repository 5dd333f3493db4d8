"""Gradient rows between ranks on the CPU (``csrc/cpu/codec.cpp``)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from .cpu_library import Structure, call, check, members
from .layout import EncodedRows, mask_words


class _Codec(Structure):
    _fields_ = (
        *members(c_void_p, "parts"),
        *members(c_int64, "part_count"),
        *members(c_void_p, "columns"),
        *members(c_int, "column_count", "width", "bfloat16"),
    )


def encode_rows(
    rows: Tensor, parts: Sequence[int], columns: Sequence[int], precision: torch.dtype = torch.float32
) -> EncodedRows:
    """Leaves out the rows that are zero in all columns that travel; see ``reference.encode_rows``."""
    check("rows", rows, torch.float32, sum(parts), rows.shape[-1])
    mask = torch.empty(sum(mask_words(parts)), dtype=torch.int32)
    left = torch.empty(len(rows), len(columns), dtype=precision)
    counts = torch.empty(len(parts), dtype=torch.int64)
    call("encode_rows", _codec(parts, columns, rows.shape[1], precision), rows, mask, left, counts)
    return EncodedRows(mask, left[: int(counts.sum())], counts)


def decode_rows(encoded: EncodedRows, parts: Sequence[int], columns: Sequence[int], width: int) -> Tensor:
    """The rows from which ``encoded`` came; see ``reference.decode_rows``."""
    check("mask", encoded.mask, torch.int32, sum(mask_words(parts)))
    check("rows", encoded.rows, encoded.rows.dtype, len(encoded.rows), len(columns))
    rows = torch.empty(sum(parts), width)
    call("decode_rows", _codec(parts, columns, width, encoded.rows.dtype), encoded.mask, encoded.rows, rows)
    return rows


def _codec(parts: Sequence[int], columns: Sequence[int], width: int, precision: torch.dtype) -> _Codec:
    return _Codec(
        parts=torch.tensor(parts, dtype=torch.int64),
        part_count=len(parts),
        columns=torch.tensor(columns, dtype=torch.int32),
        column_count=len(columns),
        width=width,
        bfloat16=precision == torch.bfloat16,
    )
