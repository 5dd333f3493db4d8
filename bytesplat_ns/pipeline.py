"""One training step, told as a story: ``ByteSplatPipeline.train_round``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras as NerfstudioCameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.datamanager import ByteSplatDataManager, ByteSplatDataManagerConfig
from bytesplat_ns.deferral import Choice
from bytesplat_ns.density.base import DensityReport
from bytesplat_ns.density.control import density_control, pruning
from bytesplat_ns.density.pruning import PruningReport
from bytesplat_ns.density.store import GaussianStore
from bytesplat_ns.export import stock
from bytesplat_ns.inspection import Inspection
from bytesplat_ns.model import ByteSplatModel, ByteSplatModelConfig
from bytesplat_ns.ops import fused
from bytesplat_ns.ops.layout import Cameras, Image, ImageGradients
from bytesplat_ns.ops.photometric import PhotometricLoss
from bytesplat_ns.optim import BETAS, EPSILON, GaussianAdam
from bytesplat_ns.parallel import checkpoint as shared_checkpoint
from bytesplat_ns.parallel import parts, ranks, tools
from bytesplat_ns.parallel.balance import rebalance
from bytesplat_ns.parallel.exchange import Exchange
from bytesplat_ns.parallel.ranks import Ranks
from bytesplat_ns.parallel.rendering import rendering_together
from bytesplat_ns.run import checkpoint, evaluation
from bytesplat_ns.run.metrics import psnr
from bytesplat_ns.run.progress import tell
from bytesplat_ns.schedules import LearningRate, RoundScale, learning_rate
from bytesplat_ns.shared import SharedParameters
from bytesplat_ns.views import Batch, Collator

BALANCED_EVERY = 500
"""Images (of a run of 30,000) after which ranks look whether one has too much to do, at the end of an epoch."""


@dataclass
class ByteSplatPipelineConfig(VanillaPipelineConfig):
    """Configuration of data and model."""

    _target: type = field(default_factory=lambda: ByteSplatPipeline)
    datamanager: ByteSplatDataManagerConfig = field(default_factory=ByteSplatDataManagerConfig)
    """specifies the datamanager config"""
    model: ByteSplatModelConfig = field(default_factory=ByteSplatModelConfig)
    """specifies the model config"""
    rebalance_threshold: float = 1.2
    """with several ranks, load of the busiest one, over the mean, beyond which Gaussians move at the end of an epoch"""
    deferred_adam: Choice = "auto"
    """let colours that no view shows catch up later, with the same outcome: on, off, or where it pays (auto)"""

    checkpoints: ClassVar[Path] = Path()  # of the run that a tool looks at; neither an option nor stored with the run


@dataclass
class RoundReport:
    """What a round leaves for the log, until the next round; nothing is computed before it is asked for."""

    losses: Tensor  # [V]
    image: Image
    batch: Batch
    background: Tensor  # [V, 3]
    density: DensityReport | None  # what density control changed after this round
    pruning: list[PruningReport]  # rounds of pruning that were judged after this round
    records: int | Tensor  # (view, Gaussian) pairs of this rank's Gaussians
    gaussians: int  # of this rank

    def read(self, ranks: Ranks) -> dict[str, float]:
        """Mean loss and PSNR of the round's views, and the number of Gaussians (waits for the device, and ranks)."""
        sums = [self.gaussians, len(self.batch), 0.0, 0.0]
        if len(self.batch):
            sums[2:] = [len(self.batch) * value for value in self._loss_and_psnr()]
        own = torch.tensor([sums], dtype=torch.float64, device=ranks.device)
        gaussians, views, loss, psnr = ranks.gather(own).sum(0).tolist()
        return {"loss": loss / views, "psnr": psnr / views, "gaussians": int(gaussians)}

    def _loss_and_psnr(self) -> tuple[float, float]:
        """Means over the views of this rank."""
        rgb, target = self.image.composed(self.background), self.batch.composed(self.background)
        psnrs = [
            psnr(rgb[v, :h, :w], target[v, :h, :w], None if self.batch.mask is None else self.batch.mask[v, :h, :w])
            for v, (w, h) in enumerate(self.batch.cameras.sizes.tolist())
        ]
        return float(self.losses.mean()), float(torch.stack(psnrs).mean())


class ByteSplatPipeline(VanillaPipeline):
    """Data, model and, while training, the optimizers and the density control."""

    config: ByteSplatPipelineConfig
    datamanager: ByteSplatDataManager
    model: ByteSplatModel

    def __init__(self, config: ByteSplatPipelineConfig, *args: Any, **kwargs: Any) -> None:
        self._for_tool = kwargs.get("test_mode", "val") != "val"
        if self._for_tool:
            config.model.forget_start()  # tools load a checkpoint of the run; the file it began with may be gone
            tools.join()
        self.ranks = ranks.of_process()
        # Nerfstudio would copy the first rank's parameters to all (DDP), but each has Gaussians of its own.
        super().__init__(config, *args, **kwargs | {"world_size": 1})
        self.world_size = self.ranks.size
        stock.speed_up_exporter()

    def load_pipeline(self, loaded_state: dict[str, Any], step: int) -> None:
        """Loads what nerfstudio's tools have read; of several ranks each loads its own part, from the files."""
        together = self._for_tool and self.ranks.size > 1
        if together or "_model.gauss_params.means" not in loaded_state:
            loaded_state = shared_checkpoint.read_model(checkpoint.path_for(self.config.checkpoints, step), self.ranks)
        super().load_pipeline(loaded_state, step)
        if stock.exporter() is not None:
            stock.leave_out_non_finite(self.model)
        if together:
            self.ranks = tools.lend(self.model, self.ranks)

    def train_round(self) -> RoundReport:
        """One optimizer step: the next round of views through all stages and back."""
        model = self.model
        # 1. The next views, at the resolution of the moment.
        round = self.datamanager.next_round(model.images_seen, model.downscale())
        own = round.owned_by(self.ranks.rank)
        poses_move = model.config.camera_optimizer.mode != "off"
        cameras, viewmats = self.collate.cameras(round.views, model.camera_optimizer if poses_move else None)
        batch = self.collate.batch(round.views, cameras, own)
        background = model.training_backgrounds(len(cameras))[own]
        observing = self.strategy.observes(model.images_seen)
        settings = model.settings(statistics=observing)

        # 2. What the optimizer's step will be like: rates of the moment, for a round of this size.
        scale = RoundScale(len(cameras))
        rates = {name: scale.learning_rate(rate(model.images_seen)) for name, rate in self._rates.items()}
        self.optimizer.prepare(rates, len(cameras), scale.betas(*BETAS), EPSILON)
        needles = self._needles_due(model.images_seen, len(cameras))
        one_rank = self.ranks.size == 1

        def stages(
            cameras: Cameras, target: Tensor, mask: Tensor | None, background: Tensor
        ) -> tuple[Tensor, Image, int | Tensor, Tensor | None]:
            # 3. Gaussians to records, records to tiles, tiles to an image without background; the loss of each view
            #    and its gradient with respect to the image; and back to gradient rows, one a record. A rank has records
            #    and rows of its own Gaussians in all views, and images of its own views with everybody's Gaussians.
            here = replace(batch, cameras=cameras if one_rank else batch.cameras, target=target, mask=mask)
            there = self.exchange.differentiate(
                self.optimizer.gaussians(cameras, settings),
                cameras,
                round.owners,
                here.cameras,
                settings,
                self.loss_of(here, background),
                self.strategy.absgrad,
            )
            # 4. Rows to parameters and poses, and the update. The Gaussians' Adam is dense, be it later.
            regularizers = self._regularizers(needles, len(cameras))
            d_viewmats = self.optimizer.step_from_rows(
                cameras, settings, there.records, there.rows, regularizers, poses_move
            )
            # 5. What density control remembers of the round.
            if observing:
                self.strategy.observe(there.records, there.rows, cameras)
            return there.losses, there.image, there.records.number, d_viewmats

        # On a GPU rounds of one kind are recorded once, and replayed: not those that ask autograd or other ranks.
        alone = one_rank and not needles and not self.config.model.use_bilateral_grid
        key = (settings, poses_move) if alone else None
        inputs, tables = (cameras, batch.target, batch.mask, background), self.optimizer.tables()
        losses, image, records, d_viewmats = self._run(stages, inputs, tables, key)
        self.optimizer.count()

        # 6. Parameters that all Gaussians share (poses, bilateral grids) have an optimizer of their own.
        self.shared.step(viewmats, d_viewmats, batch.indices, rates, scale)

        # 7. Density control: now and then grow, prune or reset. Rounds of pruning are judged ahead of a reset.
        before, model.images_seen = model.images_seen, model.images_seen + len(cameras)
        pruned = self.pruning.update(before, model.images_seen) if self.pruning is not None else []
        report = self.strategy.update(before, model.images_seen)
        model.ids = self.store.ids
        if report is not None or pruned:
            self._consider_deferral()
        if self._balance_is_due(before):
            self._plan_anew()
        return RoundReport(losses, image, batch, background, report, pruned, records, model.num_points)

    # Parts of the story -----------------------------------------------------------------------------------------

    def loss_of(self, batch: Batch, background: Tensor) -> fused.Loss:
        """What to minimise; through autograd only where bilateral grids stand between."""
        options = self.config.model
        if options.use_bilateral_grid:
            return lambda image: self._graded_loss(image, batch, background)
        inputs = batch.target, background, batch.cameras, options.ssim_lambda, batch.mask
        return PhotometricLoss(*inputs, fusing=options.fused_rasterizer)

    def _graded_loss(self, image: Image, batch: Batch, background: Tensor) -> tuple[Tensor, ImageGradients]:
        """Loss of each view [V] and its gradient."""
        weight = self.config.model.ssim_lambda
        rgb, transmittance = image.rgb.requires_grad_(), image.transmittance.requires_grad_()
        composed = (rgb + transmittance[..., None] * background[:, None, None]).clamp(0, 1)
        graded = self.model.apply_grids(composed, batch.indices)
        opaque = torch.zeros_like(transmittance)
        losses = ops.photometric_loss(graded, opaque, batch.target, background, batch.cameras, weight, batch.mask)
        self.model.bil_grids.zero_grad()  # of an attempt that was repeated
        losses.sum().backward()
        gradients = ImageGradients(rgb.grad, None, transmittance.grad)
        image.rgb, image.transmittance = rgb.detach(), transmittance.detach()
        return losses.detach(), gradients

    def _needles_due(self, before: int, views: int) -> int:
        """How often the penalty on needles is due in a round: every ten images, where it is asked for."""
        due = (before + views - 1) // 10 - (before - 1) // 10
        return due if self.config.model.use_scale_regularization else 0

    def _regularizers(self, due: int, views: int) -> dict[str, Tensor]:
        """Gradients of penalties on the parameters themselves: density control's, and PhysGaussian's on needles."""
        gradients = self.strategy.regularizers(views)
        if not due:
            return gradients
        with torch.enable_grad():
            scales = self.model.scales.detach().requires_grad_()
            extent = scales.exp()
            ratio = extent.amax(dim=1) / extent.amin(dim=1)
            excess = (ratio - self.config.model.max_gauss_ratio).clamp_min(0)
            needles = torch.autograd.grad(due * 0.1 * (excess.sum() / self.strategy.total), scales)[0]
        return gradients | {"scales": needles + gradients.get("scales", 0.0)}

    # A run's beginning and its return ---------------------------------------------------------------------------

    def start_training(self, total_images: int, optimizers: Mapping[str, Mapping[str, Any]]) -> None:
        """Makes optimizers, learning rates and density control for a run of ``total_images`` images.

        Args:
            optimizers: nerfstudio's optimizer and scheduler configurations by parameter group.
        """
        model = self.model
        model.start(total_images)
        self.collate = Collator(model.device)
        first_free = model.ids.amax() + 1 if len(model.ids) else model.ids.sum()
        self.store = GaussianStore(model.gauss_params, model.ids, int(self.ranks.gather(first_free[None]).max()))
        self.optimizer = GaussianAdam(self.store)
        self._run = fused.runner(model.device)
        model.settle = self.optimizer.deferral.settle
        groups = model.get_param_groups()
        missing = [name for name in groups if name not in optimizers]
        if missing:
            raise ValueError(f"The trainer's optimizers lack the parameter group(s) {', '.join(missing)}.")
        self._rates: dict[str, LearningRate] = {
            name: learning_rate(name, optimizers[name]["optimizer"], optimizers[name]["scheduler"], model.timeline)
            for name in groups
        }
        self.shared = SharedParameters(model, optimizers, self.ranks)
        self.exchange = Exchange(self.ranks, self.config.model.gradient_exchange, self.config.model.gradient_precision)
        self.strategy = density_control(
            self.config.model,
            model.timeline,
            model.num_train_data,
            self.store,
            self.optimizer,
            model.seed,
            self.ranks.gather,
        )
        views = Inspection(model, self.store, self.datamanager, self.collate, self.ranks)
        self.pruning = pruning(self.config.model, model.timeline, model.num_train_data, self.strategy, views)
        self._consider_deferral()

    def _consider_deferral(self) -> None:
        """Whether Adam puts off what no view shows: decided by the Gaussians that there are now."""
        choice, model = self.config.deferred_adam, self.model
        if self.ranks.size > 1:
            choice = "off"
        data = self.datamanager
        change = self.optimizer.deferral.consider(
            choice,
            data.views_per_round,
            lambda: data.training_cameras(model.device, model.images_seen),
            model.settings(),
        )
        if change:
            tell(change)

    def share_views(self) -> None:
        """Plans the rounds from now on, by what of the scene each view shows."""
        self.datamanager.share_views(self.model.images_seen, self._footprints)

    def _footprints(self, count: int) -> np.ndarray:
        """[V, count] how much of so many parts of the scene each view shows; the same for any number of ranks."""
        model, data = self.model, self.datamanager
        cameras, probes = (data.training_cameras(model.device, sample) for sample in (None, model.images_seen))
        gaussians, total = model.gaussians(), self.strategy.total
        return parts.footprints(count, gaussians, total, cameras, probes, model.settings(), self.ranks)

    def _balance_is_due(self, before: int) -> bool:
        """Whether the round that began after ``before`` images ended an epoch, and it is time again."""
        epoch = self.model.num_train_data
        period = -(-self.model.timeline.images(BALANCED_EVERY) // epoch) * epoch
        return before // period < self.model.images_seen // period

    def _plan_anew(self) -> None:
        """Moves Gaussians if one rank has too much to do, and plans the next rounds by where they are."""
        model = self.model
        if self.ranks.size > 1:
            cameras = self.datamanager.training_cameras(model.device, model.images_seen)
            busiest = rebalance(self.store, cameras, model.settings(), self.ranks, self.config.rebalance_threshold)
            model.ids = self.store.ids
            if busiest is not None and self.ranks.rank == 0:
                tell(f"One rank had {busiest:.2f} times the mean load: Gaussians moved to cells of equal load.")
        self.share_views()

    def rounds_until(self, total_images: int) -> int:
        """Rounds from now until ``total_images`` have been seen, as planned now."""
        return self.datamanager.sharing.plan.rounds_between(self.model.images_seen, total_images)

    def training_state(self) -> dict[str, Any]:
        """Everything that resuming needs besides the parameters; rows are those of this rank's Gaussians."""
        return {
            "seed": self.model.seed,
            "gaussians": self.store.state_dict(),
            "adam": self.optimizer.state_dict(),
            "rounds": self.datamanager.rounds_state(self.model.images_seen),
            "pruning": self.pruning.state_dict() if self.pruning is not None else None,
        }

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint (``parallel.checkpoint.read``): parameters, moments, statistics, position."""
        timeline = self.model.timeline
        self.load_pipeline(state["pipeline"], state["step"])
        self.model.timeline = timeline  # of this run, which may be longer
        self.model.seed = state["bytesplat"]["seed"]
        self.strategy.seed = self.model.seed
        self.store.load_state_dict(state["bytesplat"]["gaussians"])
        self.optimizer.load_state_dict(state["bytesplat"]["adam"])
        if self.pruning is not None and (pruned := state["bytesplat"].get("pruning")) is not None:
            self.pruning.load_state_dict(pruned, self.ranks.rank, self.ranks.size)
        self.strategy.limit()
        self.model.ids = self.store.ids
        self.datamanager.load_rounds(state["bytesplat"].get("rounds"), self.model.images_seen)
        for name, optimizer in self.shared.optimizers.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self._consider_deferral()

    def get_average_image_metrics(  # type: ignore[override]
        self,
        data_loader: evaluation.Views,
        image_prefix: str,
        step: int | None = None,
        output_path: Path | None = None,
        get_std: bool = False,
    ) -> dict[str, float]:
        """Metrics of ``ns-eval`` and of evaluations while training, averaged over photos."""
        self.eval()
        with rendering_together(self.model, self.ranks):
            rows = evaluation.evaluate(self.model, data_loader, output_path, image_prefix, self.ranks)
        self.train()
        return evaluation.averages(rows, get_std)

    def render_together(self, camera: NerfstudioCameras, obb_box: OrientedBox | None) -> dict[str, Tensor] | None:
        """What a camera sees, on the first rank; the viewer there has put its model into evaluation mode."""
        with rendering_together(self.model, self.ranks), torch.no_grad():
            if self.ranks.rank == 0:
                return self.model.get_outputs_for_camera(camera, obb_box)
            self.model.render_for_others(obb_box)
            return None

    def get_eval_image_metrics_and_images(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metrics of one held-out photo, and pictures; the same on every rank."""
        with rendering_together(self.model, self.ranks):
            return super().get_eval_image_metrics_and_images(step)

    def get_param_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        return self.model.get_param_groups()
