"""Runs of stages that a backend may fuse. What goes in and comes out is what the separate stages take and give."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.ops import reference
from bytesplat_ns.ops.layout import (
    COLOURS,
    AdamStep,
    Cameras,
    Differentiated,
    Gaussians,
    Image,
    ImageGradients,
    Lag,
    Records,
    RenderSettings,
    TileLists,
)
from bytesplat_ns.ops.photometric import PhotometricLoss

T = TypeVar("T")

Loss = Callable[[Image], tuple[Tensor, ImageGradients]]
"""What to minimise: from an image to the views' losses [V] and their gradient. It may be asked more than once, and
waits for nothing on a GPU."""

Announce = Callable[[Tensor], tuple[list[int], list[int]]]
"""Tells each rank how many records come [ranks], and returns these numbers and those of the records that will come from
each rank. A rank whose buffers were too short says so with negative numbers, and all are asked once more."""


class Runner(Protocol):
    """Runs a round's stages; see ``cuda.replay.Replay`` for the arguments."""

    def __call__(
        self, stages: Callable[..., T], inputs: Sequence[Any], tables: Sequence[Tensor], key: Hashable
    ) -> T: ...


def runner(device: torch.device) -> Runner:
    """What runs a round's stages on a device: CUDA records those of one round and replays them for the next ones."""
    if device.type == "cuda":
        from bytesplat_ns.ops.cuda.replay import Replay

        return Replay(device)
    return lambda stages, inputs, tables, key: stages(*inputs)


def differentiate(gaussians: Gaussians, cameras: Cameras, settings: RenderSettings, loss: Loss) -> Differentiated:
    """From Gaussians to gradient rows: ``project``, ``bin``, ``rasterize``, ``loss``, ``rasterize_backward``.

    On CUDA the stages are launched ahead of the counts that size their buffers, so that the GPU never waits for the
    host in between.
    """
    if gaussians.device.type == "cuda":
        from bytesplat_ns.ops.cuda import ahead

        return ahead.differentiate(gaussians, cameras, settings, loss)
    return differentiate_records(ops.project(gaussians, cameras, settings), cameras, settings, loss)


def differentiate_records(records: Records, cameras: Cameras, settings: RenderSettings, loss: Loss) -> Differentiated:
    """The same from records on, which may come from several ranks: rows are those of ``records``, in their order."""
    if records.table.device.type == "cuda":
        from bytesplat_ns.ops.cuda import ahead

        return ahead.differentiate_records(records, cameras, settings, loss)
    tiles = ops.bin(records, cameras)
    image = ops.rasterize(records, tiles, cameras, settings)
    losses, d_image = loss(image)
    rows = ops.rasterize_backward(records, tiles, cameras, settings, image, d_image)
    return Differentiated(records, tiles, image, losses, rows)


def reads_on_chip(records: Records, tiles: TileLists, cameras: Cameras, settings: RenderSettings, loss: Loss) -> Tensor:
    """[2] int64: of the records that the backward pass of ``differentiate_records`` goes through, those that are still
    on chip, and all. Zero where image, loss and rows are not formed in one kernel."""
    if records.table.device.type == "cuda":
        from bytesplat_ns.ops.cuda import fused_raster

        device = records.table.device
        if isinstance(loss, PhotometricLoss) and fused_raster.chosen(device, cameras, settings, loss):
            return fused_raster.count_reads(records, tiles, cameras, settings, loss)[1]
    return torch.zeros(2, dtype=torch.int64, device=records.table.device)


def place_adam(step: AdamStep, device: torch.device, before: AdamStep | None) -> AdamStep:
    """The step with its constants where the device's kernels look for them: where those of the step before were."""
    if device.type != "cuda":
        return step
    from bytesplat_ns.ops.cuda import optimizer

    return optimizer.place(step, device, None if before is None else before.table)


def project_for_owners(
    gaussians: Gaussians, cameras: Cameras, settings: RenderSettings, firsts: Sequence[int], announce: Announce
) -> tuple[Records, list[int], list[int]]:
    """``project``, for views that several ranks own, in the order of their owners.

    On CUDA the device's count of the records goes straight to the other ranks, so that the host waits once.

    Args:
        firsts: [ranks + 1] the first view of each rank, and V.

    Returns:
        records; how many of them are for each rank; how many each rank has for this one.
    """
    if gaussians.device.type == "cuda":
        from bytesplat_ns.ops.cuda import ahead

        ops.require_addressable(gaussians, cameras)
        return ahead.project_for_owners(gaussians, cameras, settings, firsts, announce)
    records = ops.project(gaussians, cameras, settings)
    starts = torch.searchsorted(records.view, torch.tensor(firsts, dtype=torch.int32))
    return records, *announce(starts.diff())


def project_backward_adam(
    gaussians: Gaussians,
    cameras: Cameras,
    settings: RenderSettings,
    records: Records,
    rows: Tensor,
    moments: Mapping[str, tuple[Tensor, Tensor]],
    step: AdamStep,
    regularizers: Mapping[str, Tensor],
    poses: bool,
    lag: Lag | None = None,
) -> Tensor | None:
    """From gradient rows to moved parameters: ``project_backward``, then ``adam`` on each of the six, in place.

    Moments average over the views of the round, see ``AdamStep``. On CUDA it is one kernel, and the parameters'
    gradients never reach memory.

    Args:
        moments: exp_avg and exp_avg_sq by parameter name, shaped like the parameter, updated in place.
        regularizers: by parameter name, gradients of regularizers on the parameters themselves: what they add to the
            sum over the views, an equal part to each.
        poses: whether the gradient of the poses is wanted.
        lag: with it, colours are moved only of Gaussians that have a record, which must have been caught up with
            (``catch_up``); for the others the step goes on record. On the host's (``Lag.past``) whoever knows that the
            step has taken place puts it.

    Returns:
        dL/d(viewmats) [V, 4, 4], or None if it is not wanted.
    """
    assert lag is None or not regularizers.keys() & set(COLOURS), "colours that no view shows have no gradient"
    arguments = gaussians, cameras, settings, records, rows
    if gaussians.device.type == "cuda":
        from bytesplat_ns.ops.cuda import deferred, projection

        d_viewmats = projection.project_backward_adam(*arguments, moments, step, regularizers, poses, lag)
        if lag is not None:
            deferred.put_on_record(lag, step, records)
        return d_viewmats
    views = len(cameras)
    gradients = ops.project_backward(*arguments, squares=views > 1)
    constants = {"beta1": step.betas[0], "beta2": step.betas[1], "eps": step.eps, "step": step.number}
    shown = None if lag is None else records.gaussian.long().unique()
    for name, gradient in gradients.parameters().items():
        square = None
        if gradients.squares is not None:
            gradient /= views
            square = gradients.squares[name].div_(views)
        if name in regularizers:
            part = regularizers[name] / views
            if square is not None:
                square += part * (2 * gradient + part)
            gradient += part
        parameter, rate = getattr(gaussians, name), step.rates[name]
        if lag is not None and name in COLOURS:
            of_shown = None if square is None else square[shown]
            reference.update_rows(parameter, gradient[shown], moments[name], step, name, shown, of_shown)
        else:
            ops.adam(parameter, gradient, *moments[name], lr=rate, **constants, square=square)
    if lag is not None:
        lag.caught_up[shown] = len(lag.past) + 1
    return gradients.viewmats if poses else None


def lag_of(gaussians: int, most_steps: int, device: torch.device) -> Lag:
    """That of Gaussians whose colours have had all steps; its record has room for ``most_steps``."""
    if device.type == "cuda":
        from bytesplat_ns.ops.cuda import deferred

        return deferred.lag_of(gaussians, most_steps, device)
    return Lag(torch.zeros(gaussians, dtype=torch.int32, device=device), past=[])


def catch_up(
    gaussians: Gaussians,
    moments: Mapping[str, tuple[Tensor, Tensor]],
    lag: Lag,
    cameras: Cameras | None,
    settings: RenderSettings,
) -> None:
    """Gives colours the steps on record that they have not had, in place.

    Args:
        moments: exp_avg and exp_avg_sq of the colours, by name.
        cameras: of at least those Gaussians that these views show; None: of all.
    """
    if gaussians.device.type == "cuda":
        from bytesplat_ns.ops.cuda import deferred

        return deferred.catch_up(gaussians, moments, lag, cameras, settings)
    if cameras is None:
        rows = torch.arange(len(gaussians), device=gaussians.device)
    else:
        rows = ops.project(gaussians, cameras, settings).gaussian.long().unique()
    return reference.catch_up(gaussians, moments, lag, rows)
