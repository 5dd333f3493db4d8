"""What is made of Nsight Compute's counters, and the counting that they are compared with."""

from __future__ import annotations

from dataclasses import replace

import counting
import pytest
import torch
import traffic
from floors import Walk, walk
from room import room

from bytesplat_ns.ops import reference
from bytesplat_ns.ops.cuda import fused_raster
from bytesplat_ns.ops.layout import RenderSettings, TileLists

HEAD = '"ID","Process Name","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
PROF = "==PROF== Connected to process 7 (/usr/bin/python3)\n"


def line(number: int, counter: str, value: str) -> str:
    return f'"{number}","python3","range","Command line profiler metrics","{counter}","byte","{value}"'


def log(ranges: int) -> str:
    counters = enumerate(traffic.COUNTERS)
    lines = [line(n, counter, f"{n + 1},00{k}") for k, counter in counters for n in range(ranges)]
    return PROF + "\n".join([HEAD, *lines]) + "\n==PROF== Disconnected from process 7\n"


def test_counters_by_range():
    measured = traffic.read_counters(log(11))
    assert len(measured) == 11, "in the order of numbers, not of words"
    assert [counters["dram__bytes.sum"] for counters in measured] == [1000 * (n + 1) for n in range(11)]
    assert measured[1]["lts__t_sectors_srcunit_tex.sum"] == 32 * 2002


@pytest.mark.parametrize(
    "said, cause",
    [
        (PROF + "==ERROR== ERR_NVGPUCTRPERM", "ERR_NVGPUCTRPERM"),
        (log(2).replace("2,001", "n/a"), "'n/a' for lts__t_bytes.sum"),
        ("\n".join(log(1).splitlines()[:-2]), "Range 0 has no lts__t_sectors_srcunit_tex_op_read.sum"),
    ],
)
def test_what_went_wrong_is_said(said, cause):
    with pytest.raises(SystemExit, match=cause):
        traffic.read_counters(said)


def test_table_without_the_other_side():
    """gsplat may be missing; a scene so small that nothing reaches device memory has no ratio."""
    counters = [dict.fromkeys(traffic.COUNTERS, value) for value in (2e6, 1e6)]
    counters[0]["dram__bytes.sum"] = 0
    known = {"records": 1, "pairs": 2, "lists": "half of them", "gsplat left out": "ImportError: gsplat"}
    counted = {"counted": {traffic.ONE: {"total": 2e6}, traffic.THREE: {"total": 1e6}}}
    sides = zip((traffic.THREE, traffic.ONE), counters, strict=True)
    found = traffic.table([{"scene": "a", "side": side, **own, **known, **counted} for side, own in sides])
    assert "one kernel against three kernels: device memory none, L2 -50.0%" in found
    assert "half of them" in found and "gsplat left out: ImportError" in found and "200.0%" in found


def lists(*lengths: int) -> TileLists:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    none = torch.zeros(0, dtype=torch.int64)
    return TileLists(offsets, torch.zeros(int(offsets[-1]), dtype=torch.int32), none, none)


def test_bytes_of_lists():
    """Two tiles: one list is read to its end by all parts, the other by one part alone, which saturates early."""
    _, cameras = room(10, 32, 16, device="cpu")
    walked = Walk(0, torch.tensor([[2, 2, 2, 2], [1, 0, 0, 0]]))
    tiles, used = lists(40, 200), torch.tensor([[40, 40, 40, 40], [20, 0, 0, 0]])
    three = counting.three_kernels(walked, tiles, used, 100, cameras)
    # Records of 64 bytes, places of 4 and 28 a batch; the batch behind the last is on its way.
    assert three.lists_forward == 64 * (160 + 64 + 3 * 32) + 4 * (160 + 160) + 28 * (8 + 5)
    assert three.lists_backward == 64 * (160 + 32) + 4 * (160 + 160) + 28 * (8 + 5)
    assert three.rows == 96 * 180 + 64 * 100
    reads = torch.stack([used, used, used], -1)
    resident = counting.one_kernel(walked, tiles, reads, 100, cameras)
    assert resident.lists_backward == 0 and resident.rows == three.rows
    assert resident.lists_forward == 64 * (40 + 64) + 4 * (40 + 64) + 28 * 4
    reads[0, :, 1] //= 2
    streaming = counting.one_kernel(walked, tiles, reads, 100, cameras)
    assert streaming.lists_backward == 4 * (64 * 32 + 4 * 32 + 28)


def test_batches_are_those_that_begin_before_saturation():
    gaussians, cameras = room(900, 44, 27, device="cpu")
    gaussians.opacities[:] += 1
    gaussians.scales[:] -= 0.5
    records = reference.project(gaussians, cameras, RenderSettings())
    tiles = reference.bin(records, cameras)
    batches, lengths = walk(records, tiles, cameras).batches, tiles.offsets.diff()
    image = reference.rasterize(records, tiles, cameras, RenderSettings())
    open_parts = torch.nn.functional.pad(image.transmittance[0], (0, 4, 0, 5)).view(2, 2, 8, 3, 2, 8)
    open_parts = open_parts > 0.11  # which no saturated pixel is: at least 1e-4 / (1 - ALPHA_MAX)
    open_parts = open_parts.permute(0, 3, 1, 4, 2, 5).reshape(len(lengths), 4, -1).any(-1)
    whole = -(-lengths // 32)[:, None].expand(-1, 4)
    assert open_parts.any() and (batches[open_parts] == whole[open_parts]).all()
    assert (batches <= whole).all() and (batches < whole).any(), "some parts saturate before their list ends"


@pytest.mark.parametrize("columns, rows", [(3, 2), (2, 3)])
def test_the_kernel_counts_in_its_own_order(columns, rows):
    _, cameras = room(10, 16 * columns, 16 * rows, device="cpu")
    places = [(c, r) for c in range(columns) for r in range(rows)]
    if rows >= columns:
        places = [(c, r) for r in range(rows) for c in range(columns)]
    counted = torch.tensor([[100 * r + c] * 3 for c, r in places for _ in range(4)]).repeat(2, 1, 1)
    found = fused_raster.by_tile(counted, replace(cameras, viewmats=cameras.viewmats.repeat(2, 1, 1)))
    assert found[:, 0, 0].tolist() == 2 * [100 * r + c for r in range(rows) for c in range(columns)]
