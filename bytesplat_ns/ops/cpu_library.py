"""Which of the CPU's libraries is in use, and calls into it.

The same sources (csrc/cpu) are compiled for several levels of the x86-64 instruction set by ``cpu_build``; the best
that exists and that this CPU supports is loaded at first use. BYTESPLAT_CPU_LIBRARY=v4, v3 or base asks for one of
them, none for the torch reference instead.
"""

from __future__ import annotations

import ctypes
import os
import platform
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import cpu_build, sources

FOLDER = Path(__file__).resolve().parent
"""Where the libraries lie."""

_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
CPU_FLAGS = {
    "v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "v3": _V3,
    "base": set(),
}
"""What a CPU must have for a level, in the words of /proc/cpuinfo."""


def available() -> bool:
    """Whether there is a library for this CPU (and BYTESPLAT_CPU_LIBRARY is not ``none``).

    Raises:
        ValueError: BYTESPLAT_CPU_LIBRARY is not one of v4, v3, base, none.
        RuntimeError: it names a library that is missing or that this CPU cannot run.
    """
    return level() is not None


@cache
def level() -> str | None:
    """The level of the library in use, None for no library; raises as ``available``."""
    return choose_level(os.environ.get("BYTESPLAT_CPU_LIBRARY", ""), FOLDER, cpu_flags())


def cpu_flags() -> set[str]:
    """Instruction sets of this CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())


def choose_level(asked: str, folder: Path, flags: set[str]) -> str | None:
    """The level that BYTESPLAT_CPU_LIBRARY asks for, or the best that ``folder`` has and ``flags`` allow."""
    if asked == "none":
        return None
    if asked and asked not in CPU_FLAGS:
        raise ValueError(f"BYTESPLAT_CPU_LIBRARY={asked}: expected one of {', '.join(CPU_FLAGS)}, none")
    for name, needed in CPU_FLAGS.items():
        path = cpu_build.library(folder, name)
        if asked == name and not path.exists():
            raise RuntimeError(
                f"BYTESPLAT_CPU_LIBRARY={asked}: there is no {path}; build it with python -m bytesplat_ns.ops.cpu_build"
            )
        if asked == name and not needed <= flags:
            missing = ", ".join(sorted(needed - flags))
            raise RuntimeError(f"BYTESPLAT_CPU_LIBRARY={asked}: this CPU ({platform.machine()}) lacks {missing}")
        if asked in ("", name) and path.exists() and needed <= flags:
            return name
    return None


@cache
def load(name: str) -> ctypes.CDLL:
    """The library of a level.

    Raises:
        RuntimeError: the library does not fit this machine's others (the C++ runtime, say), or was made of other
            sources than those that are here: what it is called with would not be what it expects.
    """
    path = cpu_build.library(FOLDER, name)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(
            f"{path} cannot be loaded: {error}. Delete it and build it here with python -m bytesplat_ns.ops.cpu_build, "
            "or set BYTESPLAT_CPU_LIBRARY=none to run the torch reference."
        ) from error
    if _made_of(library) != cpu_build.fingerprint():
        raise RuntimeError(
            f"{path} was made of other sources than those in {sources.csrc()}, which have changed since. "
            "Build it anew: python -m bytesplat_ns.ops.cpu_build"
        )
    return library


def _made_of(library: ctypes.CDLL) -> str:
    """The fingerprint of a library's sources; empty for one that does not know it yet."""
    try:
        ask = library.bytesplat_sources
    except AttributeError:
        return ""
    ask.restype = ctypes.c_char_p
    return ask().decode()


NO_MEMORY = -1
"""What a function returns that could not allocate memory (``csrc/cpu/entry.h``)."""


def call(function: str, *arguments: Any) -> int:
    """Calls a function of the library: structures by reference, tensors by their memory. Returns what it returns.

    Raises:
        MemoryError: it could not allocate what it works with; its outputs hold nothing that may be used.
    """
    name = level()
    assert name is not None, "callers ask available() first"
    converted = [
        ctypes.byref(x) if isinstance(x, ctypes.Structure) else c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x
        for x in arguments
    ]
    result = _function(name, function)(c_int(torch.get_num_threads()), *converted)
    if result == NO_MEMORY:
        raise MemoryError(f"The CPU kernels could not allocate memory ({function}).")
    return result


@cache
def _function(name: str, function: str) -> Any:
    entry = getattr(load(name), f"bytesplat_{function}")
    entry.restype = c_int64
    return entry


def check(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """The kernels read memory as it lies: anything but the expected layout is an error."""
    if tensor.shape == shape and tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous():
        return
    strided = "" if tensor.is_contiguous() else ", not contiguous (call .contiguous())"
    raise ValueError(
        f"{name}: expected {list(shape)} of {dtype} on cpu, "
        f"found {list(tensor.shape)} of {tensor.dtype} on {tensor.device}{strided}"
    )


class Structure(ctypes.Structure):
    """A C structure that takes its fields by keyword, tensors for pointers, and keeps those tensors alive."""

    def __init__(self, **values: Any) -> None:
        self.tensors = [x for x in values.values() if isinstance(x, Tensor)]
        super().__init__(**{name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in values.items()})


def members(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Fields of one type, for ``Structure._fields_``."""
    return [(name, kind) for name in names]
