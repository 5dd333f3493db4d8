"""Records on their way to the ranks that own the views: rows of 12 words, the record and where it belongs.

Two words hold the id (48 bits) and the view (16 bits) of the record: with them a row is as long as the CUDA kernels
want it, which then read it where it has arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import RECORD_WIDTH, Records

WIDTH = RECORD_WIDTH + 2

ID_BITS = 48


def pack(records: Records) -> Tensor:
    """[M, WIDTH] float32, in the order of the records."""
    place = records.ids | records.view.long() << ID_BITS
    return torch.cat([records.table, place.view(torch.float32).view(-1, 2)], dim=1)


def unpack(rows: Tensor, first_view: int) -> Records:
    """The records that have come [M, WIDTH], of views from ``first_view`` on, which becomes view 0."""
    place = rows[:, RECORD_WIDTH:].contiguous().view(torch.int64)[:, 0]
    view = ((place >> ID_BITS) - first_view).int()
    ids = place & (1 << ID_BITS) - 1
    table = rows[:, :RECORD_WIDTH]
    if rows.device.type == "cuda":
        from .cuda.buffers import received

        return received(table, view, ids)
    none = torch.empty(0)
    return Records(table.contiguous(), none.int(), view, none, ids)
