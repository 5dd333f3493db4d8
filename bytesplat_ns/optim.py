"""Adam over the Gaussians of a store, fed with explicit gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops import fused
from bytesplat_ns.ops.layout import Cameras, Gaussians, Records, RenderSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class GaussianAdam:
    """Dense Adam (Kingma and Ba, 2015, algorithm 1) with a learning rate per parameter tensor.

    Dense means that Gaussians without a gradient keep moving with their momentum. The moments are columns
    ``<parameter>.exp_avg`` and ``<parameter>.exp_avg_sq`` of the store, so they follow their rows; a new row
    starts with zero moments.

    Attributes:
        betas, eps, views: of the next step. A round of several views is a longer step, with betas to their number.
        steps: steps taken so far.
        age: views of all steps so far. Bias correction needs the product of all betas, which is
            ``beta ** (age / views)`` however many views the rounds had.
        rates: learning rate of the last step by parameter name; empty before the first.
    """

    def __init__(self, store: GaussianStore, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-15) -> None:
        self.store = store
        self.betas = betas
        self.eps = eps
        self.views = 1
        self.steps = self.age = 0
        self.rates: Mapping[str, float] = {}
        for name in Gaussians.PARAMETERS:
            for moment in MOMENTS:
                store.register(f"{name}.{moment}", tuple(store.parameters[name].shape[1:]))

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        """Move every parameter once, in place.

        Args:
            gradients: dL/d(raw parameter) by name, shaped like the parameters.
            rates: learning rate of this step by parameter name.
        """
        self._count()
        self.rates = rates
        for name in Gaussians.PARAMETERS:
            parameter = self.store.parameters[name].detach()
            assert gradients[name].shape == parameter.shape, f"{name}: one gradient for each parameter"
            ops.adam(
                parameter,
                gradients[name],
                *self.moments(name),
                lr=rates[name],
                beta1=self.betas[0],
                beta2=self.betas[1],
                eps=self.eps,
                step=self.age / self.views,
            )

    @torch.no_grad()
    def step_from_rows(
        self,
        cameras: Cameras,
        settings: RenderSettings,
        records: Records,
        rows: Tensor,
        rates: Mapping[str, float],
        regularizers: Mapping[str, Tensor | float],
        poses: bool,
    ) -> Tensor | None:
        """Project a round's gradient rows back to the parameters and move every parameter once, in place.

        Args:
            cameras, settings, records, rows: as in ``ops.project_backward``.
            rates: learning rate of this step by parameter name.
            regularizers: gradients to add, by parameter name. Without any, a backend may fuse all of it.
            poses: whether the gradient of the poses is wanted.

        Returns:
            dL/d(viewmats) [V, 4, 4], or None if it is not wanted.
        """
        gaussians = self.store.gaussians()
        if regularizers:
            gradients = ops.project_backward(gaussians, cameras, settings, records, rows)
            by_name = gradients.parameters()
            for name, gradient in regularizers.items():
                by_name[name] += gradient
            self.step(by_name, rates)
            return gradients.viewmats if poses else None
        self._count()
        self.rates = rates
        moments = {name: self.moments(name) for name in Gaussians.PARAMETERS}
        constants = {"betas": self.betas, "eps": self.eps, "step": self.age / self.views, "poses": poses}
        return fused.project_backward_adam(
            gaussians, cameras, settings, records, rows, moments, rates, **constants
        )

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """First and second moment of a parameter, both shaped like it; live, until rows come or go."""
        first, second = (self.store.columns[f"{name}.{moment}"] for moment in MOMENTS)
        return first, second

    def forget(self, name: str, rows: Tensor | slice = slice(None)) -> None:
        """Zero the moments of a parameter, for instance because its values have been set from outside.

        Args:
            rows: [n] int64 indices of the Gaussians concerned; all by default.
        """
        for moment in self.moments(name):
            moment[rows] = 0.0

    def _count(self) -> None:
        self.steps += 1
        self.age += self.views

    def state_dict(self) -> dict[str, Any]:
        """What the store does not hold: it saves the moments with its other columns."""
        return {"steps": self.steps, "age": self.age, "betas": list(self.betas), "eps": self.eps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.age = state["steps"], state["age"]
        self.betas = tuple(state["betas"])
        self.eps = state["eps"]
