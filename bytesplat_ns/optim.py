"""Adam over the Gaussians of a store, fed with gradient rows; and torch's, for parameters that Gaussians share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bytesplat_ns.deferral import Deferral
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.ops import fused
from bytesplat_ns.ops.layout import AdamStep, Cameras, Gaussians, Records, RenderSettings

MOMENTS = ("exp_avg", "exp_avg_sq")

BETAS, EPSILON = (0.9, 0.999), 1e-15
"""Adam's constants for one view, as splatfacto's."""


class GaussianAdam:
    """Dense Adam (Kingma and Ba, 2015, algorithm 1) with a learning rate per parameter tensor.

    Dense means that Gaussians without a gradient keep moving with their momentum, be it later (``deferral``). The
    moments are columns ``<parameter>.exp_avg`` and ``<parameter>.exp_avg_sq`` of the store, so they follow their
    rows; a new row starts with zero moments.

    A step is ``prepare``, which depends on the round's number of views alone; ``step_from_rows``, which launches it
    and may have to be repeated, or is recorded and replayed; and ``count``, once it has taken place.

    Attributes:
        steps: steps taken so far.
        begun: the same, and one more as soon as the next has begun to move parameters.
        age: views of all steps so far. Bias correction needs the product of all betas, which is
            ``beta ** (age / views)`` however many views the rounds had.
    """

    def __init__(self, store: GaussianStore) -> None:
        self.store = store
        self.deferral = Deferral(store)
        self.steps = self.begun = self.age = 0
        self._views = 0
        self._step: AdamStep | None = None  # the one prepared last
        for name in Gaussians.PARAMETERS:
            for moment in MOMENTS:
                store.register(f"{name}.{moment}", tuple(store.parameters[name].shape[1:]))

    def prepare(
        self,
        rates: Mapping[str, float],
        views: int = 1,
        betas: tuple[float, float] = BETAS,
        eps: float = EPSILON,
    ) -> None:
        """Says what the next step is like.

        Args:
            rates: learning rate by parameter name.
            views: of the round. A round of several views is a longer step, with betas to their number.
        """
        self._views, self.begun = views, self.steps
        step = AdamStep(rates, betas, eps, number=(self.age + views) / views)
        self._step = fused.place_adam(step, self.store.device, self._step)
        self.deferral.prepare()

    @torch.no_grad()
    def gaussians(self, cameras: Cameras, settings: RenderSettings) -> Gaussians:
        """The Gaussians of the prepared step: live, and up to date as far as these views show them."""
        self.deferral.catch_up(cameras, settings)
        live = self.store.gaussians()
        return replace(live, **{name: getattr(live, name).detach() for name in Gaussians.PARAMETERS})

    def tables(self) -> list[Tensor]:
        """What a step reads and writes: the store's tables, and where colours are put off, the record of steps."""
        return [*self.store.live(), *self.deferral.tables()]

    @torch.no_grad()
    def step_from_rows(
        self,
        cameras: Cameras,
        settings: RenderSettings,
        records: Records,
        rows: Tensor,
        regularizers: Mapping[str, Tensor],
        poses: bool,
    ) -> Tensor | None:
        """Project a round's gradient rows back to the parameters and move every parameter once, in place.

        Args:
            cameras, settings, records, rows: as in ``ops.project_backward``.
            regularizers: gradients of regularizers on the parameters themselves, by parameter name.
            poses: whether the gradient of the poses is wanted.

        Returns:
            dL/d(viewmats) [V, 4, 4], or None if it is not wanted.
        """
        assert self._step is not None, "prepare comes first"
        moments = {name: self._moments(name) for name in Gaussians.PARAMETERS}
        self.begun = self.steps + 1
        arguments = cameras, settings, records, rows, moments, self._step, regularizers, poses
        return fused.project_backward_adam(self.store.gaussians(), *arguments, self.deferral.lag)

    def count(self) -> None:
        """The prepared step has taken place."""
        self.steps += 1
        self.begun = self.steps
        self.age += self._views
        assert self._step is not None, "prepare comes first"
        self.deferral.count(self._step)

    @property
    def rates(self) -> Mapping[str, float]:
        """Learning rates of the step that was prepared last, by parameter name."""
        return {} if self._step is None else self._step.rates

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """First and second moment of a parameter, both shaped like it; until the next step, or rows come or go."""
        self.deferral.settle()
        return self._moments(name)

    def _moments(self, name: str) -> tuple[Tensor, Tensor]:
        first, second = (self.store.columns[f"{name}.{moment}"] for moment in MOMENTS)
        return first, second

    def forget(self, name: str, rows: Tensor | slice = slice(None)) -> None:
        """Zero the moments of a parameter, for instance because its values have been set from outside.

        Args:
            rows: [n] int64 indices of the Gaussians concerned; all by default.
        """
        for moment in self.moments(name):
            moment[rows] = 0.0

    def state_dict(self) -> dict[str, Any]:
        """What the store does not hold: it saves the moments with its other columns."""
        return {"steps": self.steps, "age": self.age}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = self.begun = state["steps"]
        self.age = state["age"]
