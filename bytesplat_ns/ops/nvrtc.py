"""CUDA kernels from source, compiled when they are first needed: no nvcc, no host compiler, no build step.

NVRTC, which every CUDA build of torch brings along, compiles a file of ``csrc/cuda`` together with the headers it
includes for the GPU at hand. What a run knows (image channels, degree of the harmonics, switches) becomes a compile-
time constant. Compiled programs are kept on disk, so that only the first run on a machine waits for the compiler.

    program = Program("adam.cu")
    program.kernel("adam")(blocks, threads, parameter, gradient, ...)   # on torch's current stream
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bytesplat_ns.ops.sources import csrc

log = logging.getLogger(__name__)

OLDEST = 80
"""Lowest compute capability (times ten) the kernels are written for: asynchronous copies, tf32 and bf16 matrices."""

Constants = tuple[tuple[str, int], ...]
"""Compile-time constants by name, sorted."""

Launch = Callable[[int, int, list[Any]], None]
"""Starts a loaded kernel: number of blocks, threads of a block, arguments."""


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
        self.parameters = parse_parameters(program.source, name)
        self._launch: dict[torch.device, Launch] = {}

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
        launch(blocks, threads, [convert(value) for convert, value in zip(self.parameters, arguments, strict=True)])


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


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
SCALARS = {"int": np.int32, "unsigned": np.uint32, "long long": np.int64, "float": np.float32}


@cache
def parse_parameters(source: str, kernel: str) -> list[Callable[[Any], Any]]:
    """What turns each Python argument into the kernel's parameter, read from its C signature."""
    match = re.search(rf"__global__ void[^;{{}}]*?\b{kernel}\s*\(([^)]*)\)\s*\{{", re.sub(r"//.*", "", source))
    assert match, f"no kernel {kernel}"
    parameters = []
    for declaration in match[1].split(","):
        pattern = r"\s*(?:const )?([\w ]+?)\s*(\*?)\s*(?:__restrict__ )?(\w+)\s*"
        kind, star, name = re.fullmatch(pattern, declaration).groups()
        parameters.append(_pointer(kernel, name, POINTERS[kind]) if star else SCALARS[kind])
    return parameters


def _pointer(kernel: str, name: str, dtypes: tuple[torch.dtype, ...]) -> Callable[[Tensor | None], int]:
    def convert(tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} of kernel {kernel} must be {dtypes[0]}, not {tensor.dtype}.")
        return tensor.data_ptr()

    return convert


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
        # are sums of products, which round as much. Exponentials and logarithms stay exact unless a kernel says otherwise.
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
        from cuda.core import Device, LaunchConfig, Stream, launch
    except ImportError as error:
        raise RuntimeError("The CUDA kernels need the package cuda-core: pip install 'cuda-core>=1.2'.") from error
    gpu = Device(device.index)
    gpu.set_current()
    kernel = _compile(program, constants, _target(gpu)).get_kernel(name)
    configurations: dict[tuple[int, int], LaunchConfig] = {}

    def start(blocks: int, threads: int, arguments: list[Any]) -> None:
        configuration = configurations.get((blocks, threads))
        if configuration is None:
            configuration = configurations[blocks, threads] = LaunchConfig(grid=blocks, block=threads)
        # The stream is looked up each time: a graph being captured has its own.
        stream = Stream.from_handle(torch.cuda.current_stream(device).cuda_stream)
        if torch.cuda.current_device() == device.index:
            launch(stream, configuration, kernel, *arguments)
        else:
            with torch.cuda.device(device):
                launch(stream, configuration, kernel, *arguments)

    return start


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
