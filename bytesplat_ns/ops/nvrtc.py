"""CUDA kernels from source, compiled when they are first needed: no nvcc, no host compiler, no build step.

NVRTC, which every CUDA build of torch brings along, compiles a file of ``csrc/cuda`` together with the headers it
includes for the GPU at hand. What a run knows (image channels, degree of the harmonics, switches) becomes a compile-
time constant. Compiled programs are kept on disk, so that only the first run on a machine waits for the compiler.

    program = Program("adam.cu")
    program.kernel("adam")(blocks, threads, parameter, gradient, ...)   # on torch's current stream
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bytesplat_ns.ops.sources import csrc

log = logging.getLogger(__name__)

OLDEST = 80
"""Lowest compute capability (times ten) the kernels are written for: asynchronous copies, products of bf16."""

Constants = tuple[tuple[str, int], ...]
"""Compile-time constants by name, sorted."""

Launch = Callable[[int, int, Any], None]
"""Starts a loaded kernel: number of blocks, threads of a block, where each parameter lies (``void*[]``)."""


class Program:
    """One file of ``csrc/cuda``, compiled anew for each set of constants and each kind of device."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.kernel = lru_cache(maxsize=None)(self._kernel)

    def _kernel(self, name: str, **constants: int) -> Kernel:
        return Kernel(self, name, tuple(sorted((name, int(value)) for name, value in constants.items())))

    @property
    def source(self) -> str:
        """The file and the headers it includes, as one text."""
        return read_source(self.file)


class Kernel:
    """A kernel with its compile-time constants; calling it launches it. Compiled at the first call on a device."""

    def __init__(self, program: Program, name: str, constants: Constants) -> None:
        self.program = program
        self.name = name
        self.constants = constants
        self.parameters = Parameters(program.source, name)
        self._launch: dict[torch.device, Launch] = {}
        self._lock = threading.Lock()

    def __call__(self, blocks: int, threads: int, *arguments: Tensor | int | float | None) -> None:
        """Launches on the current stream of the device that the tensors are on.

        Args:
            blocks: number of blocks; with none, nothing is launched.
            arguments: in the order of the kernel's parameters. A pointer takes a tensor of its type, or None.
        """
        if blocks == 0:
            return
        device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
        launch = self._launch.get(device)
        if launch is None:
            launch = self._launch[device] = load(self.program, self.name, self.constants, device)
        with self._lock:  # the viewer's thread renders while training goes on
            launch(blocks, threads, self.parameters.place(arguments))


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability, major and minor."""
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class SharedMemory:
    """A GPU's shared memory, bytes."""

    multiprocessor: int  # of a multiprocessor
    block: int  # that a block may declare
    reserved: int  # that each block takes besides


@cache
def shared_memory(device: torch.device) -> SharedMemory:
    """How much shared memory a GPU has."""
    from cuda.core import Device

    limits = Device(device.index).properties
    return SharedMemory(
        limits.max_shared_memory_per_multiprocessor,
        limits.max_shared_memory_per_block,
        limits.reserved_shared_memory_per_block,
    )


# From Python to a kernel's parameters ---------------------------------------------------------------------------------

POINTERS = {
    "float": (torch.float32,),
    "double": (torch.float64,),
    "int": (torch.int32,),
    "unsigned": (torch.int32,),
    "long long": (torch.int64,),
    "unsigned long long": (torch.int64,),
    "unsigned char": (torch.uint8, torch.bool),
}
SCALARS = {"int": "i4x", "unsigned": "I4x", "long long": "q", "float": "f4x"}  # for struct, 8 bytes each


class Parameters:
    """A kernel's parameters, read from its C signature, and where they lie for a launch.

    Launching is what a step's Python mostly does: one call of ``struct`` for all parameters keeps it short.
    """

    def __init__(self, source: str, kernel: str) -> None:
        match = re.search(rf"__global__ void[^;{{}}]*?\b{kernel}\s*\(([^)]*)\)\s*\{{", re.sub(r"//.*", "", source))
        assert match, f"no kernel {kernel}"
        pattern = r"\s*(?:const )?([\w ]+?)\s*(\*?)\s*(?:__restrict__ )?(\w+)\s*"
        declarations = [re.fullmatch(pattern, declaration).groups() for declaration in match[1].split(",")]
        self.kernel = kernel
        self.names = [name for _, _, name in declarations]
        self.dtypes = [POINTERS[kind] if star else () for kind, star, _ in declarations]  # of tensors; none for numbers
        self._format = struct.Struct("<" + "".join("Q" if star else SCALARS[kind] for kind, star, _ in declarations))
        self._buffer = ctypes.create_string_buffer(self._format.size)
        start = ctypes.addressof(self._buffer)
        self._places = (ctypes.c_void_p * len(self.names))(*(start + 8 * i for i in range(len(self.names))))

    def place(self, arguments: tuple[Tensor | int | float | None, ...]) -> ctypes.Array[ctypes.c_void_p]:
        """Puts the arguments in their places; valid until the next call."""
        values = []
        for argument, dtypes in zip(arguments, self.dtypes, strict=True):
            if not dtypes:
                values.append(argument)
            elif argument is None:
                values.append(0)
            elif argument.dtype in dtypes:
                values.append(argument.data_ptr())
            else:
                name = self.names[len(values)]
                raise TypeError(f"{name} of kernel {self.kernel} must be {dtypes[0]}, not {argument.dtype}.")
        self._format.pack_into(self._buffer, 0, *values)
        return self._places


# From source text to machine code -------------------------------------------------------------------------------------


@cache
def read_source(file: str) -> str:
    """A file of ``csrc/cuda`` with each header that it includes put in once, where it is first needed.

    One text without include paths is what a compiled program can be looked up by.
    """
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        path = next(path for folder in ("cuda", "common") if (path := csrc() / folder / name).exists())
        text = path.read_text().replace("#pragma once\n", "")
        return re.sub(r'^#include "([\w.]+)"\n', lambda include: expand(include[1]), text, flags=re.MULTILINE)

    return expand(file)


def program_options(program: Program, constants: Constants, arch: str, **more: Any) -> Any:
    """What NVRTC is told, apart from the source."""
    from cuda.core import ProgramOptions

    macros = [(name, str(int(value))) for name, value in constants]
    return ProgramOptions(
        name=program.file,
        arch=arch,
        std="c++17",
        define_macro=macros or None,
        # Quotients and roots to 2 ulp in two instructions instead of twenty, denormals as zero: what follows them here
        # are sums of products, which round as much. Exponentials and logarithms stay exact but where a kernel says so.
        ftz=True,
        prec_div=False,
        prec_sqrt=False,
        diag_suppress=177,  # constants of a shared header that this file has no use for
        **more,
    )


def load(program: Program, name: str, constants: Constants, device: torch.device) -> Launch:
    """Compiles, or takes from the cache, and loads a kernel for a device.

    Raises:
        RuntimeError: there is no compiler or the GPU is too old; the text says what to do.
    """
    try:
        from cuda.core import Device
    except ImportError as error:
        raise RuntimeError("The CUDA kernels need the package cuda-core: pip install 'cuda-core>=1.2'.") from error
    gpu = Device(device.index)
    gpu.set_current()
    kernel = _compile(program, constants, _target(gpu)).get_kernel(name)
    function, driver = int(kernel.handle), _driver()

    def start(blocks: int, threads: int, parameters: Any, kernel: Any = kernel) -> None:  # keeps the kernel loaded
        # The stream is looked up each time: a graph being captured has its own.
        stream = torch.cuda.current_stream(device).cuda_stream
        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return start(blocks, threads, parameters)
        status = driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, None)
        if status == INVALID_CONTEXT:  # the first call of a thread that has not used the GPU yet
            gpu.set_current()
            status = driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, None)
        if status:
            raise RuntimeError(f"Kernel {name} could not be launched on {gpu.name}: CUDA driver error {status}.")

    return start


def record_in_graph(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Adds to the graph that a stream is being recorded in that it records the event whenever it is replayed.

    (``torch.cuda.Event(external=True)``, which not all versions of torch have.)
    """
    status = _driver().cuEventRecordWithFlags(event.cuda_event, stream.cuda_stream, EVENT_RECORD_EXTERNAL)
    if status:
        raise RuntimeError(f"An event could not be made part of a CUDA graph: CUDA driver error {status}.")


EVENT_RECORD_EXTERNAL = 1
"""CU_EVENT_RECORD_EXTERNAL"""

INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT"""


@cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver, called directly: a launch through it costs a few microseconds, some twenty times in a step."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuEventRecordWithFlags.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return driver


@cache
def _compile(program: Program, constants: Constants, target: tuple[str, str]) -> Any:
    from cuda.core import Program as Compiler

    arch, code = target
    try:
        compiler = Compiler(program.source, "c++", program_options(program, constants, arch))
        return compiler.compile(code, cache=_compiled_programs())
    except Exception as error:
        raise RuntimeError(
            f"NVRTC could not compile {program.file} for {arch}. If no NVRTC library was found, install the one of "
            "torch's CUDA version (pip install 'cuda-toolkit[nvrtc]'); if the driver rejects the result, it is older "
            f"than that version. {error}"
        ) from error


def _target(gpu: Any) -> tuple[str, str]:
    """Architecture and kind of code for a GPU. One that this NVRTC does not know yet gets PTX from its newest."""
    from cuda.bindings import nvrtc

    capability = 10 * gpu.compute_capability.major + gpu.compute_capability.minor
    if capability < OLDEST:
        raise RuntimeError(
            f"{gpu.name} has compute capability {capability / 10}; the kernels need {OLDEST / 10}. "
            "Run on the CPU: --machine.device-type cpu."
        )
    _, known = nvrtc.nvrtcGetSupportedArchs()
    return (f"sm_{capability}", "cubin") if capability in known else (f"compute_{max(known)}", "ptx")


@cache
def _compiled_programs() -> Any:
    """Where compiled programs are kept: on disk, or where that is impossible, in memory."""
    from cuda.core.utils import FileStreamProgramCache, InMemoryProgramCache

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("BYTESPLAT_KERNEL_CACHE") or home / "bytesplat-ns" / "kernels")
    try:
        programs = FileStreamProgramCache(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        log.warning("Compiled kernels are not kept (%s). Set BYTESPLAT_KERNEL_CACHE to a writable folder.", error)
        return InMemoryProgramCache()
    log.info("Compiled kernels are kept in %s.", folder)
    return programs
