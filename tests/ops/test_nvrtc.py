"""Compiling and launching CUDA kernels, as far as no GPU is needed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytesplat_ns.ops import nvrtc
from bytesplat_ns.ops.nvrtc import Program, parse_parameters, read_source

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
    converters = parse_parameters(SOURCE, "scale")
    values, counts = torch.zeros(3), torch.zeros(3, dtype=torch.int32)
    arguments = [values, counts, 2**40, 0.5, 7]
    converted = [convert(argument) for convert, argument in zip(converters, arguments, strict=True)]
    assert converted == [values.data_ptr(), counts.data_ptr(), 2**40, 0.5, 7]
    assert [type(value).__name__ for value in converted[2:]] == ["int64", "float32", "uint32"]
    assert converters[0](None) == 0


def test_a_tensor_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(TypeError, match="counts of kernel scale must be torch.int32, not torch.int64"):
        parse_parameters(SOURCE, "scale")[1](torch.zeros(3, dtype=torch.int64))


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
