"""Buffers whose used length only the device knows, and how long to make them.

The kernels count visible records and (record, tile) pairs on the device. Buffers are made longer than the last counts;
a kernel whose output does not fit raises ``halted``, and all later kernels of the step then do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bytesplat_ns.ops.layout import RECORD_WIDTH, Image, Records

RECORD_STRIDE = 12
"""Floats from one record to the next: 48 bytes, read as three times 16."""

GRADIENT_ROW_STRIDE = 16
"""Floats from one gradient row with statistics to the next; 12 without them."""

RECORDS, PAIRS, HALTED = range(3)
"""What the three int64 of a step's state say (``StepState`` in ``csrc/cuda/step.h``)."""


@dataclass
class DeviceRecords(Records):
    """Records that know their number on the device. Rows beyond it hold nothing that may be read."""

    state: Tensor  # [3] int64: records, pairs, halted
    ascending: bool  # whether ids ascend from row to row of a view

    @property
    def number(self) -> Tensor:
        return self.state[RECORDS]


@dataclass
class DeviceImage(Image):
    """An image that knows the state of the step it belongs to: where that has halted, there is nothing in it."""

    state: Tensor  # [3] int64, of its records


def on_device(records: Records) -> DeviceRecords:
    """Any records, with rows of RECORD_STRIDE floats and a state."""
    table, device = records.table, records.table.device
    if table.stride() != (RECORD_STRIDE, 1):
        table = torch.zeros(len(records), RECORD_STRIDE, device=device)[:, :RECORD_WIDTH]
        table.copy_(records.table)
    if isinstance(records, DeviceRecords):
        return replace(records, table=table)
    state = torch.zeros(3, dtype=torch.int64, device=device)
    state[RECORDS] = len(records)
    ascending = (records.ids[1:] > records.ids[:-1]) | (records.view[1:] != records.view[:-1])
    others = {field.name: getattr(records, field.name) for field in fields(Records)[1:]}
    return DeviceRecords(table, **others, state=state, ascending=bool(ascending.all()))


def upload(values: Sequence[float], memory: Tensor) -> None:
    """Copies numbers [n] from the host to the device without waiting.

    The copy is made from pinned memory, which torch gives to no one else before the copy is done.
    """
    memory.copy_(torch.tensor(values, dtype=memory.dtype, pin_memory=memory.is_cuda), non_blocking=True)


def received(table: Tensor, view: Tensor, ids: Tensor) -> DeviceRecords:
    """Records that have come from other ranks, part after part."""
    device = table.device
    state = torch.zeros(3, dtype=torch.int64, device=device)
    state[RECORDS] = len(table)
    none = torch.empty(0, device=device)
    return DeviceRecords(table, none.int(), view, none, ids, state, ascending=False)


def ids_ascend(ids: Tensor) -> bool:
    """Whether ids ascend. Asked of the device once for each tensor: rows come and go hundreds of steps apart."""
    version, ascending = _ascending.get(ids, (None, False))
    if version != ids._version:
        ascending = bool((ids[1:] > ids[:-1]).all())
        _ascending[ids] = ids._version, ascending
    return ascending


_ascending = WeakIdKeyDictionary()


class Capacity:
    """How long to make a buffer, from what the last ones of its kind held.

    Lengths are rounded up, at most by a quarter, so that few of them occur: each needs a recording of its own
    (``replay``).

    Args:
        most: what the kernels can number.
        what: is counted, for the message of an error.
    """

    SMALLEST = 1 << 18

    def __init__(self, most: int, what: str) -> None:
        self.most = most
        self._what = what
        self._needed: dict[torch.device, int] = {}

    def __call__(self, device: torch.device) -> int:
        room = max(self.SMALLEST, int(1.25 * self._needed.get(device, 0)))
        unit = 1 << max(room.bit_length() - 3, 0)
        return min(-(-room // unit) * unit, self.most)

    def learn(self, device: torch.device, needed: int) -> None:
        """Remembers a count. Forgets a large one slowly, so that views of very different cost may alternate.

        Raises:
            ValueError: it is more than the kernels can number.
        """
        if needed > self.most:
            raise ValueError(
                f"A round has {needed:,} {self._what}; the kernels can number {self.most:,}. Show fewer views at once "
                "(--pipeline.datamanager.views-per-round) or smaller ones (--downscale-factor of the data parser)."
            )
        self._needed[device] = max(needed, int(0.999 * self._needed.get(device, 0)))
