"""A small capture, a run of ``ns-train`` on it, and that run's model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from commands import SAVE_EVERY, STEPS, Run, Terminal, arguments

from bytesplat_ns.demo.capture import Capture, write_capture

if TYPE_CHECKING:
    from bytesplat_ns.pipeline import ByteSplatPipeline


@pytest.fixture(scope="session")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    return Terminal(tmp_path_factory.mktemp("terminal"))


@pytest.fixture(scope="session")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nerfstudio folder of 12 photos, 96 x 72 pixels: large enough for LPIPS at full resolution, and for SSIM's
    window at the quarter resolution of the first steps. Photos 0, 4 and 8 are held out."""
    folder = tmp_path_factory.mktemp("capture")
    write_capture(folder, Capture(views=12, width=96, height=72, supersample=2, points=1500, workers=1))
    return folder


@pytest.fixture(scope="session")
def trained(terminal: Terminal, capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of ``ns-train`` that kept three checkpoints."""
    output = tmp_path_factory.mktemp("trained")
    keep = "--steps-per-save", str(SAVE_EVERY), "--save-only-latest-checkpoint", "False"
    printed = terminal.run("ns-train", *arguments(capture, output, *keep, steps=STEPS))
    return Run(output / "scene/bytesplat/run", printed)


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """Nerfstudio's tools take a GPU where there is one; these tests are of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def pipeline(no_gpu: None, trained: Run) -> ByteSplatPipeline:
    """The trained model and its data, loaded as nerfstudio's tools do."""
    from nerfstudio.utils.eval_utils import eval_setup

    return eval_setup(trained.config)[1]
