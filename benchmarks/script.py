"""Runs one of nerfstudio's scripts in this process, and writes what it took.

    python benchmarks/script.py REPORT (train | eval) [--without-lpips] ARGUMENTS OF THE SCRIPT

The report is JSON: steps a second between the first and the last training step (saving included, evaluation after the
last one not), peak bytes of the GPU that torch allocated, and pixels of an average training photo.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


class Clock:
    """Notes when a pipeline's training steps begin."""

    def __init__(self, pipeline: type, step: str) -> None:
        self.first = self.last = 0.0
        self.steps = self.pixels = 0
        original = getattr(pipeline, step)

        def timed(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
            self.last = time.monotonic()
            if self.steps == 0:
                self.first = self.last
                cameras = pipeline.datamanager.train_dataset.cameras
                self.pixels = int((cameras.width * cameras.height).float().mean())
            self.steps += 1
            return original(pipeline, *args, **kwargs)

        setattr(pipeline, step, timed)

    @property
    def steps_per_second(self) -> float | None:
        return (self.steps - 1) / (self.last - self.first) if self.steps > 1 else None


def leave_out_lpips() -> None:
    """LPIPS becomes NaN: stock splatfacto downloads its weights before it trains."""
    import torchmetrics.image
    import torchmetrics.image.lpip

    class Left(torch.nn.Module):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def forward(self, *_: torch.Tensor) -> torch.Tensor:
            return torch.tensor(float("nan"))

    for module in (torchmetrics.image, torchmetrics.image.lpip):
        module.LearnedPerceptualImagePatchSimilarity = Left  # type: ignore[attr-defined]


def main() -> None:
    report, script = Path(sys.argv.pop(1)), sys.argv.pop(1)
    if sys.argv[1:2] == ["--without-lpips"]:
        del sys.argv[1]
        leave_out_lpips()
    from nerfstudio.pipelines.base_pipeline import VanillaPipeline

    from bytesplat_ns.pipeline import ByteSplatPipeline

    clocks = Clock(VanillaPipeline, "get_train_loss_dict"), Clock(ByteSplatPipeline, "train_round")
    import_module(f"nerfstudio.scripts.{script}").entrypoint()
    clock = max(clocks, key=lambda clock: clock.steps)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    took = {"steps_per_second": clock.steps_per_second, "peak_gpu_bytes": peak, "pixels": clock.pixels}
    report.write_text(json.dumps(took))


if __name__ == "__main__":
    main()
