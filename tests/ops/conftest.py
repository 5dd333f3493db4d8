"""The backends under test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import emulator
import pytest
import torch
from backends import Backend

from bytesplat_ns.ops import reference


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Scenes are so small that threads would mostly wait for one another, ten times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["reference", "cpu", "cuda"], scope="session")
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """Each backend in turn; without a GPU, the CUDA kernels run on an emulator."""
    if request.param == "reference":
        return Backend("reference", reference, "cpu")
    name = f"bytesplat_ns.ops.{request.param}"
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} does not exist")
    module = importlib.import_module(name)
    if request.param == "cuda" and not torch.cuda.is_available():
        emulator.install(tmp_path_factory.mktemp("emulator"))
        return Backend("cuda", module, "cpu")
    if request.param == "cpu" and not module.available():
        pytest.skip("the CPU library is not built")
    return Backend(request.param, module, request.param)
