"""Compiling and launching CUDA kernels, as far as no GPU is needed."""

from __future__ import annotations

import ctypes
import logging
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytesplat_ns.ops import nvrtc
from bytesplat_ns.ops.nvrtc import Parameters, Program, read_source

SOURCE = """
extern "C" __global__ void __launch_bounds__(32)
scale(const float* __restrict__ values,  // [N] what is scaled (by a lot)
      int* counts, long long count, float factor, unsigned flags) {
}
"""


def test_sources_are_complete() -> None:
    """Each header is there once, and nothing is left to look up."""
    text = read_source("project_backward.cu")
    assert "#include" not in text.replace("#include <cmath>", "")
    for definition in ("struct Camera {", "struct AdamStep {", "inline void sh_basis("):
        assert text.count(definition) == 1


def test_parameters_are_those_of_the_signature() -> None:
    values, counts = torch.zeros(3), torch.zeros(3, dtype=torch.int32)
    parameters = Parameters(SOURCE, "scale")
    places = parameters.place((values, counts, 2**40, 0.5, 7))
    kinds = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_float, ctypes.c_uint]
    placed = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
    assert placed == [values.data_ptr(), counts.data_ptr(), 2**40, 0.5, 7]


def test_a_missing_tensor_is_a_null_pointer() -> None:
    parameters = Parameters(SOURCE, "scale")
    place = parameters.place((None, torch.zeros(3, dtype=torch.int32), 1, 1.0, 1))[0]
    assert ctypes.c_void_p.from_address(place).value is None


def test_arguments_that_do_not_fit_are_refused() -> None:
    parameters, values, counts = Parameters(SOURCE, "scale"), torch.zeros(3), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"counts of kernel scale must be torch\.int32, not torch\.int64"):
        parameters.place((values, counts.long(), 1, 1.0, 1))
    with pytest.raises(struct.error):
        parameters.place((values, counts, 1, 1.0, 2**32))
    with pytest.raises(ValueError, match="longer"):
        parameters.place((values, counts, 1, 1.0))


def test_a_kernel_is_made_once_for_its_constants() -> None:
    program = Program("adam.cu")
    assert program.kernel("adam") is program.kernel("adam")
    assert program.kernel("adam", A=True).constants == (("A", 1),)


def gpu(major: int, minor: int) -> Any:
    return SimpleNamespace(name="A GPU", compute_capability=SimpleNamespace(major=major, minor=minor))


def test_code_for_a_gpu() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    assert nvrtc._target(gpu(9, 0)) == ("sm_90", "cubin")
    arch, code = nvrtc._target(gpu(99, 0))  # the compiler's newest, for the driver to translate
    assert arch.startswith("compute_") and code == "ptx"
    with pytest.raises(RuntimeError, match=r"A GPU has compute capability 7\.5; the kernels need 8\.0"):
        nvrtc._target(gpu(7, 5))


def test_compiled_programs_stay_in_memory_where_no_folder_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    utils = pytest.importorskip("cuda.core.utils")
    (tmp_path / "file").touch()
    monkeypatch.setenv("BYTESPLAT_KERNEL_CACHE", str(tmp_path / "file" / "kernels"))
    with caplog.at_level(logging.WARNING):
        programs = nvrtc._compiled_programs.__wrapped__()
    assert isinstance(programs, utils.InMemoryProgramCache)
    assert "BYTESPLAT_KERNEL_CACHE" in caplog.text


def test_a_second_process_finds_compiled_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core.utils")
    monkeypatch.setenv("BYTESPLAT_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_compiled_programs", nvrtc._compiled_programs.__wrapped__)
    target = ("sm_90", "cubin")
    code = nvrtc._compile.__wrapped__(Program("adam.cu"), (), target).code
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert code in [path.read_bytes() for path in stored]
    before = {path: path.stat().st_mtime_ns for path in stored}
    assert nvrtc._compile.__wrapped__(Program("adam.cu"), (), target).code == code
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_compile_errors_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setattr(nvrtc, "read_source", lambda _: SOURCE.replace("{", "{ nonsense;"))
    with pytest.raises(RuntimeError, match="nonsense"):
        nvrtc._compile.__wrapped__(Program("scale.cu"), (), ("sm_90", "cubin"))


def test_usage_of_a_kernel() -> None:
    pytest.importorskip("cuda.core")
    from bytesplat_ns.ops.compile_check import compile_for

    ((kernel, registers, shared, stack, spilled),) = compile_for(Program("adam.cu"), {}, "sm_80")
    assert kernel == "adam" and 16 <= registers <= 255 and shared == stack == spilled == 0
