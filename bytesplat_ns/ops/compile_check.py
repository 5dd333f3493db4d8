"""Compiles every CUDA kernel for every kind of GPU and prints what it uses; needs no GPU.

    python -m bytesplat_ns.ops.compile_check [sm_90 ...]

Fails on a compile error and on a kernel that spills registers to memory.
"""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch
from cuda.core import Program as Compiler

from . import residency
from .cuda import binning, codec, deferred, fused_raster, optimizer, projection, raster
from .cuda.loss import LOSS
from .cuda.observe import OBSERVE
from .cuda.shake import SHAKE
from .layout import ROW_WIDTH, ROW_WIDTH_WITH_STATISTICS, RenderSettings
from .nvrtc import Program, SharedMemory, program_options
from .photometric import PhotometricLoss

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

USAGE = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<spill>\d+) bytes spill stores, "
    r"\d+ bytes spill loads.*?Used (?P<registers>\d+) registers(?P<more>[^\n]*)",
    re.DOTALL,
)


def variants(arch: str) -> Iterator[tuple[Program, dict[str, int]]]:
    """The programs for a kind of GPU, with constants that between them switch everything on and off."""
    yield optimizer.ADAM, {}
    yield binning.BINNING, {}
    yield projection.STARTS, {}
    yield SHAKE, {}
    yield from ((OBSERVE, {"ABSOLUTE": absolute}) for absolute in (0, 1))
    yield from ((binning.SORTING, constants) for constants in (binning.BY_DEPTH, binning.BY_TILE))
    for degree, antialiased in product(range(4), (0, 1)):
        shape = {"SH_DEGREE": degree, "SH_STORED": 15, "ANTIALIASED": antialiased}
        yield projection.FORWARD, shape
        for multi_view, (poses, fused) in product((0, 1), ((1, 0), (0, 1), (1, 1))):
            if degree == 3 or antialiased == multi_view == 0:
                squares = int(multi_view and (fused or antialiased))
                switches = {"MULTI_VIEW": multi_view, "SQUARES": squares, "POSES": poses, "FUSED": fused}
                yield projection.BACKWARD, shape | switches | {"DEFERRED": 0}
                if fused and not poses:
                    yield projection.BACKWARD, shape | switches | {"DEFERRED": 1}
    for everyone, antialiased in product((0, 1), (0, 1)):
        yield deferred.CATCH_UP, {"SH_STORED": 15, "ANTIALIASED": antialiased, "EVERYONE": everyone}
    yield from ((raster.LENGTHS, {"STOP_ADD": stop_add, "INTERVAL": 0, "UNROLL": 1}) for stop_add in (0, 1))
    for stop_add, interval in product((0, 1), (0, 1)):
        switches = {"STOP_ADD": stop_add, "INTERVAL": interval}
        yield raster.FORWARD, raster.FORWARD_SHAPE | switches
        for statistics, exact in product((False, True), (False, True)):
            depth = interval ^ exact
            yield raster.BACKWARD, raster.backward_constants(switches, statistics, bool(depth), exact)
    yield from fused_variants(arch)
    for precision in (torch.float32, torch.bfloat16):
        yield codec.CODEC, codec.codec_constants(range(9), codec.row_stride(ROW_WIDTH), precision)
        yield codec.CODEC, codec.codec_constants(range(14), codec.row_stride(ROW_WIDTH_WITH_STATISTICS), precision)
    for channels, from_bytes, masked in product((3, 4), (0, 1), (0, 1)):
        yield LOSS, {"TARGET_CHANNELS": channels, "TARGET_BYTES": from_bytes, "MASKED": masked}


def fused_variants(arch: str) -> Iterator[tuple[Program, dict[str, int]]]:
    """The fused rasterizer with the room that a multiprocessor of 228 KiB of shared memory has."""
    capability = divmod(int(arch.removeprefix("sm_")), 10)
    limits = SharedMemory(multiprocessor=228 << 10, block=48 << 10, reserved=1 << 10)
    for number, (statistics, exact) in enumerate(product((False, True), (False, True))):
        blocks = residency.most_blocks(capability, exact)
        room = residency.Budget(blocks, residency.slots_for(limits, blocks, statistics, exact), 0)
        kind = torch.uint8 if number % 2 else torch.float32
        target = torch.empty(1, 1, 1, 3 + (number == 0), dtype=kind)
        loss = PhotometricLoss(target, target, None, mask=target if number < 2 else None)
        settings = RenderSettings(statistics=statistics, stop="add" if number == 3 else "drop")
        yield fused_raster.FUSED, fused_raster.fused_constants(room, settings, loss, exact, number == 3)


def compile_for(program: Program, constants: dict[str, int], arch: str) -> list[tuple[str, int, int, int, int]]:
    """Kernel, registers, shared memory, stack frame and spilled bytes of each kernel of a program."""
    report = io.StringIO()
    options = program_options(program, tuple(sorted(constants.items())), arch, ptxas_options=["-v"])
    Compiler(program.source, "c++", options).compile("cubin", logs=report)
    found = []
    for use in USAGE.finditer(report.getvalue()):
        shared = re.search(r"(\d+) bytes smem", use["more"])
        numbers = (int(use["registers"]), int(shared[1]) if shared else 0, int(use["stack"]), int(use["spill"]))
        found.append((use["kernel"], *numbers))
    assert found, f"no resource usage in the compiler's report:\n{report.getvalue()}"
    return found


def main() -> int:
    """Prints the table; returns the number of kernels that failed or spill."""
    architectures = sys.argv[1:] or ARCHITECTURES
    jobs = [(program, constants, arch) for arch in architectures for program, constants in variants(arch)]
    began = time.perf_counter()

    def run(job: tuple[Program, dict[str, int], str]) -> list[tuple[str, int, int, int, int]] | str:
        try:
            return compile_for(*job)
        except Exception as error:
            return str(error)

    bad = 0
    print(f"{'kernel':22}{'arch':>8}{'registers':>11}{'shared':>8}{'stack':>7}{'spilled':>9}  constants")
    with ThreadPoolExecutor() as pool:
        for (program, constants, arch), result in zip(jobs, pool.map(run, jobs), strict=True):
            if isinstance(result, str):
                bad += 1
                print(f"{program.file} {constants} {arch}: {result}")
                continue
            text = " ".join(f"{name}={int(value)}" for name, value in constants.items())
            for kernel, registers, shared, stack, spilled in result:
                bad += bool(spilled)
                print(f"{kernel:22}{arch:>8}{registers:>11}{shared:>8}{stack:>7}{spilled:>9}  {text}")
    print(f"{len(jobs)} programs in {time.perf_counter() - began:.1f} s, {bad} failed or spill.")
    return bad


if __name__ == "__main__":
    sys.exit(min(main(), 1))
