"""Runs the CUDA kernels on a CPU, so that machines without a GPU test them too.

The text that NVRTC would compile is compiled by g++ with ``simt.h`` in place of ``csrc/cuda/device.h``. ``install``
puts this in the place of NVRTC; the stages of ``ops.cuda`` then take CPU tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

from bytesplat_ns.ops import nvrtc, residency
from bytesplat_ns.ops.cuda import binning, fused_raster

HERE = Path(__file__).parent


def install(folder: Path) -> None:
    """Kernels run on the CPU from now on; libraries are built in ``folder``."""

    def load(program: nvrtc.Program, name: str, constants: nvrtc.Constants, device: torch.device) -> nvrtc.Launch:
        assert device.type == "cpu"
        return getattr(_library(program.file, constants, folder), f"launch_{name}")

    nvrtc.load = load
    binning.multiprocessors = lambda device: 1  # few blocks, so that each has several things to do
    residency.multiprocessors = lambda device: 64
    residency.capability = fused_raster.capability = lambda device: (9, 0)
    residency.shared_memory = lambda device: nvrtc.SharedMemory(200 << 10, 48 << 10, 1 << 10)


@cache
def _library(file: str, constants: nvrtc.Constants, folder: Path) -> ctypes.CDLL:
    source = _emulated_source(file, constants)
    stem = f"{Path(file).stem}-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    library = folder / f"{stem}.so"
    if not library.exists():
        text = folder / f"{stem}.cpp"
        text.write_text(source)
        # Nothing is contracted but explicit fma, and nothing reordered: the kernels' own order of operations.
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-march=native", "-U_FORTIFY_SOURCE"]
        command += ["-shared", "-fPIC"]
        command += ["-Wno-unknown-pragmas", "-o", str(library), str(text)]
        subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def _emulated_source(file: str, constants: nvrtc.Constants) -> str:
    """The kernels' text with the emulator ahead, and behind it a function that launches each kernel."""
    text = nvrtc.read_source(file)
    header = HERE.parents[1].parent / "csrc" / "cuda" / "device.h"
    device = re.escape(header.read_text().replace("#pragma once\n", ""))
    text = re.sub(device, "", text)
    macros = [f"#define {name} {int(value)}" for name, value in constants]
    kernels = re.findall(r"__global__ void[^;{}]*?(\w+)\s*\(([^)]*)\)\s*\{", re.sub(r"//.*", "", text))
    launchers = []
    for name, parameters in kernels:
        types = [re.sub(r"\s*\w+\s*$", "", p.strip().replace("__restrict__ ", "")) for p in parameters.split(",")]
        arguments = ", ".join(f"*({kind}*)arguments[{i}]" for i, kind in enumerate(types))
        launchers.append(
            f'extern "C" void launch_{name}(unsigned blocks, unsigned threads, void** arguments) {{\n'
            f"    simt::launch(blocks, threads, [=] {{ {name}({arguments}); }});\n}}"
        )
    return "\n".join([*macros, '#include "%s"' % (HERE / "simt.h"), text, *launchers])
