"""Parameters that all Gaussians share, poses and bilateral grids: an optimizer of their own, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.model_components.lib_bilagrid import total_variation_loss
from torch import Tensor

from bytesplat_ns.model import ByteSplatModel
from bytesplat_ns.optim import BETAS, EPSILON, MOMENTS
from bytesplat_ns.parallel.ranks import Ranks
from bytesplat_ns.schedules import RoundScale


class SharedParameters:
    """Steps on them after each round.

    Args:
        optimizers: nerfstudio's optimizer and scheduler configurations by parameter group; learning rates come with
            each step.
    """

    def __init__(self, model: ByteSplatModel, optimizers: Mapping[str, Mapping[str, Any]], ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        groups = {name: own for name, own in model.get_param_groups().items() if name not in model.gauss_params}
        constant = {name: {"optimizer": optimizers[name]["optimizer"], "scheduler": None} for name in groups}
        self.optimizers = Optimizers(constant, groups)

    def step(
        self, viewmats: Tensor, d_viewmats: Tensor | None, own: list[int], rates: Mapping[str, float], scale: RoundScale
    ) -> None:
        """Optimizer step of the parameters that all Gaussians share, the same on every rank.

        Args:
            viewmats, d_viewmats: [V, 4, 4] of all views of the round, and the gradient from this rank's Gaussians.
            own: photos whose views this rank owns.
        """
        penalties: dict[str, Tensor] = {}
        if d_viewmats is not None:
            viewmats.backward(self.ranks.sum(d_viewmats, "shared"))
            of_poses: dict[str, Tensor] = {}
            self.model.camera_optimizer.get_loss_dict(of_poses)
            penalties["camera_opt"] = sum(of_poses.values())
        if self.model.config.use_bilateral_grid:
            grids = self.model.bil_grids.grids  # [photos, ...]
            self._share_rows(grids, own)
            penalties["bilateral_grid"] = 10 * total_variation_loss(grids)
        for name, optimizer in self.optimizers.optimizers.items():
            constants = rates[name], scale.betas(*BETAS), EPSILON, scale.views
            step_on_round(optimizer, *constants, penalties.get(name))
            optimizer.zero_grad(set_to_none=True)

    def _share_rows(self, parameter: Tensor, own: list[int]) -> None:
        """Makes the rows of a parameter's gradient, each of which one rank has, known to all ranks."""
        if self.ranks.size == 1:
            return
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        rows = self.ranks.gather(torch.tensor(own, dtype=torch.int64, device=gradient.device), "shared")
        gradient[rows] = self.ranks.gather(gradient[own], "shared")
        parameter.grad = gradient


def step_on_round(
    optimizer: torch.optim.Adam,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    views: int,
    penalty: Tensor | None = None,
) -> None:
    """A step of torch's Adam on a round of ``views`` views, whose constants are given; moments average over views.

    Gradients are sums over the views, of which each has elements of its own: a photo's pose, its grid.

    As with ``GaussianAdam.age``, bias correction needs the product of all betas, however many views the rounds had.
    Torch raises the betas of this step to the power of ``state["step"]``: that counts views, and steps of this round's
    size while torch looks at it.

    Args:
        penalty: what every view adds to the loss, for all elements.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_penalty = [0.0] * len(parameters) if penalty is None else torch.autograd.grad(penalty, parameters)
    for parameter, common in zip(parameters, of_penalty, strict=True):
        own = parameter.grad / views
        parameter.grad = own + common
        if views > 1:
            # Torch takes in the square of this mean. What the mean of the squares is beyond it, their variance, goes
            # ahead: of the views one has views * own, the others nothing, and the penalty is common to all.
            state = optimizer.state[parameter]
            if not state:
                moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
                state.update(moments, step=torch.tensor(0.0))
            state["exp_avg_sq"].addcmul_(own, own, value=(views - 1) * (1 - betas[1]) / betas[1])
    for group in optimizer.param_groups:
        group["lr"], group["betas"], group["eps"] = rate, betas, eps
    for state in optimizer.state.values():
        state["step"].div_(views)
    optimizer.step()
    for state in optimizer.state.values():  # those too that are new
        state["step"].mul_(views).round_()
