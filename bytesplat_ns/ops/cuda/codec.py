"""Gradient rows between ranks (``csrc/cuda/codec.cu``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import EncodedRows, mask_words
from bytesplat_ns.ops.nvrtc import Program

CODEC = Program("codec.cu")
THREADS = 256


def encode_rows(
    rows: Tensor, parts: Sequence[int], columns: Sequence[int], precision: torch.dtype = torch.float32
) -> EncodedRows:
    """Leaves out the rows that are zero in all columns that travel; see ``ops.reference.encode_rows``.

    Does not wait for their number: the result has room for all rows.
    """
    stride = row_stride(rows.shape[1])
    if rows.stride() != (stride, 1) or rows.data_ptr() % 16:
        rows = torch.nn.functional.pad(rows, (0, stride - rows.shape[1]))
    device = rows.device
    mask = torch.empty(sum(mask_words(parts)), dtype=torch.int32, device=device)
    left = torch.empty(len(rows), len(columns), dtype=precision, device=device)
    counts = torch.zeros(len(parts), dtype=torch.int64, device=device)
    blocks, counter, lookback = _blocks(parts, device)
    kernel = CODEC.kernel("encode_rows", **codec_constants(columns, stride, precision))
    kernel(blocks, THREADS, rows, _upload(parts, device), mask, left.view(torch.uint8), counts, counter, lookback)
    return EncodedRows(mask, left, counts)


def decode_rows(encoded: EncodedRows, parts: Sequence[int], columns: Sequence[int], width: int) -> Tensor:
    """The rows from which ``encoded`` came; see ``ops.reference.decode_rows``."""
    stride, device = row_stride(width), encoded.mask.device
    rows = torch.empty(sum(parts), stride, device=device)
    blocks, counter, lookback = _blocks(parts, device)
    kernel = CODEC.kernel("decode_rows", **codec_constants(columns, stride, encoded.rows.dtype))
    left = encoded.rows.view(torch.uint8)
    kernel(blocks, THREADS, encoded.mask, left, _upload(parts, device), rows, counter, lookback)
    return rows[:, :width]


def codec_constants(columns: Sequence[int], stride: int, precision: torch.dtype) -> dict[str, int]:
    """Constants of both kernels."""
    bfloat16 = int(precision == torch.bfloat16)
    return {"COLUMNS": sum(1 << column for column in columns), "STRIDE": stride, "BFLOAT16": bfloat16}


def row_stride(width: int) -> int:
    """Floats from one row to the next, so that rows are read 16 bytes at a time."""
    return -(-width // 4) * 4


def _blocks(parts: Sequence[int], device: torch.device) -> tuple[int, Tensor, Tensor]:
    """Number of blocks, and what they find zeroed: their counter, and a word each to look back at."""
    blocks = sum(-(-rows // THREADS) for rows in parts)
    scratch = torch.zeros(1 + blocks, dtype=torch.int64, device=device)
    return blocks, scratch[:1].view(torch.int32), scratch[1:]


def _upload(parts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(parts, dtype=torch.int64).to(device, non_blocking=True)
