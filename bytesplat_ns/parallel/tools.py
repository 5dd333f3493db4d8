"""``ns-eval`` and ``ns-render`` on several ranks, for models that are too large for one device.

    torchrun --nproc-per-node 4 --no-python ns-eval --load-config ...

Each process that torchrun starts runs the tool up to where the checkpoint is loaded, and takes its own part of the
Gaussians. From there on only the first goes on: whenever it renders, the others send it their records that reach the
view. So it has the pixels and metrics of one process, to the last bit (on CPUs), and writes what the tool writes. The
others end when it does.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bytesplat_ns.ops.layout import Cameras, Gaussians, Image, RenderSettings
from bytesplat_ns.parallel.launch import Place, join_torchrun
from bytesplat_ns.parallel.ranks import ALONE, RankLeft, Ranks
from bytesplat_ns.parallel.rendering import render_together, rendering_together

if TYPE_CHECKING:
    from bytesplat_ns.model import ByteSplatModel

IN_ONE_PROCESS = {
    "nerfstudio.scripts.exporter": "ns-export runs in one process. A model that fits none is exported, as one PLY, by "
    "bytesplat-export, without torchrun.",
    "nerfstudio.scripts.viewer.run_viewer": "ns-viewer runs in one process: start it without torchrun.",
}
"""Nerfstudio's tools that ask for more than renderings, and what to do instead."""


def join() -> None:
    """Makes this process, in which one of nerfstudio's tools runs, a rank if torchrun has started several.

    Raises:
        ValueError: the tool cannot share a model with other ranks, or there are fewer GPUs than ranks.
    """
    place = Place.of_torchrun()
    if place is None or place.size == 1:
        return
    started = getattr(sys.modules["__main__"], "__spec__", None)  # python -m
    for module, advice in IN_ONE_PROCESS.items():
        if module in sys.modules or (started is not None and started.name == module):
            raise ValueError(advice)
    join_torchrun(place, "cuda" if torch.cuda.is_available() else "cpu")  # as the tools choose


def lend(model: ByteSplatModel, ranks: Ranks) -> Ranks:
    """Lets the first rank render the model of all as if it were its own. All ranks call together.

    Returns:
        on the first rank the group that it works in from now on: itself.

    Raises:
        SystemExit: on the others, once the first one has ended.
    """
    if ranks.rank > 0:
        with rendering_together(model, ranks), suppress(RankLeft):
            while True:
                model.render_for_others(ranks.broadcast(None))
        dist.destroy_process_group()
        raise SystemExit

    def render(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> Image:
        ranks.broadcast(None if model.training else model.crop_box)
        image = render_together(gaussians, cameras, settings, ranks)
        assert image is not None, "this rank wanted one"
        return image

    model.render_gaussians = render
    atexit.register(_dismiss, ranks.leave)
    return ALONE


def _dismiss(leave: Callable[[], bool]) -> None:
    """Ends the other ranks, whatever this one ended with: torchrun reports that."""
    with suppress(RuntimeError):  # they are gone: a signal was for all
        if leave():
            dist.destroy_process_group()
