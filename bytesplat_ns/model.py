"""The Splatfacto variant: parameters, options, and what a camera sees.

Everything a training step does with the model is in ``pipeline.py``; this file answers what the model *is* at a moment
of the run (resolution, SH degree, background) and renders single views for evaluation, export and the viewer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.cameras.cameras import Cameras as NerfstudioCameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes
from nerfstudio.model_components.lib_bilagrid import BilateralGrid, color_correct
from nerfstudio.model_components.lib_bilagrid import slice as slice_grid
from nerfstudio.models.base_model import Model
from nerfstudio.models.splatfacto import SplatfactoModel, SplatfactoModelConfig
from nerfstudio.utils.colors import get_color
from nerfstudio.utils.rich_utils import CONSOLE
from pytorch_msssim import SSIM
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.density.philox import uniform
from bytesplat_ns.ops.layout import Cameras, Gaussians, Image, RenderSettings
from bytesplat_ns.ops.photometric import Fusing
from bytesplat_ns.options import refuse_random_start
from bytesplat_ns.parallel import ranks
from bytesplat_ns.parallel.partition import own_part
from bytesplat_ns.run.metrics import Lpips, view_metrics
from bytesplat_ns.schedules import REFERENCE_IMAGES, Timeline
from bytesplat_ns.splats import initialization
from bytesplat_ns.splats.frames import Similarity
from bytesplat_ns.splats.start_from import start_from
from bytesplat_ns.views import adjust, world_to_camera

VIEWER_BACKGROUND = (0.1490, 0.1647, 0.2157)
"""What evaluation and the viewer show behind a model trained on random backgrounds (the viewer's own colour)."""

BACKGROUND_BLOCK = 1024
"""Random backgrounds are drawn for so many images at a time (no round has more views)."""


@dataclass
class ByteSplatModelConfig(SplatfactoModelConfig):
    """Options of splatfacto with splatfacto's meaning; schedule values are those of a 30,000-image run."""

    _target: type = field(default_factory=lambda: ByteSplatModel)
    max_gaussians: int = 3_000_000
    """hard cap on the number of Gaussians, never exceeded"""
    strategy: Literal["default", "mcmc"] = "default"
    """how Gaussians come and go: duplicated, split and pruned by screen gradient (splatfacto), or sampled by opacity
    (3DGS-MCMC); method bytesplat-mcmc also sets the schedule and the cap of its authors"""
    min_opacity: float = 0.005
    """mcmc: opacity up to which a Gaussian is dead and moves to a live one"""
    noise_lr: float = 5e5
    """mcmc: noise on the means, in units of their learning rate and of the Gaussian's covariance"""
    mcmc_opacity_reg: float = 0.01
    """mcmc: weight of the mean opacity in the loss"""
    mcmc_scale_reg: float = 0.01
    """mcmc: weight of the mean standard deviation in the loss"""
    prune_share: float = 0.1
    """largest part of the Gaussians that one round of pruning removes, those that do least harm to the training views;
    0: never prune. With 0.1, runs of 10,000 images kept half of their Gaussians, +0.24 dB on held-out photos"""
    prune_budget: int | None = None
    """entries of a tile's list that should suffice: pruning goes on until 95 % of all tiles keep to it (default: what
    stays on chip of the GPU; on a CPU nothing is pruned unless it is given)"""
    prune_cost: Literal["uniform", "root", "tiles"] = "root"
    """what the harm of removing a Gaussian is divided by: nothing (uniform); the square root of the number of tiles
    that list it, those where it is beyond the budget counted twice (root); or this number, and then only Gaussians in
    tiles over budget go (tiles)"""
    prune_guard: float = 0.05
    """dB of PSNR on training photos that a round of pruning may cost once the model has recovered; else it is undone"""
    prune_veto: float = 0.9
    """contribution to any one pixel (0 to 1) from which on a Gaussian is never pruned"""
    prune_start: int = 15_000
    """first round of pruning"""
    prune_stop: int = 25_500
    """last round of pruning"""
    prune_every: int = 1_500
    """from one round of pruning to the next, by when the model must have recovered"""
    schedule_length: int | None = None
    """images for which all schedules are laid out; default: the length of the run (schedules stretch and shrink with
    it). 30000 restores splatfacto's absolute steps."""
    sh_degree: Literal[0, 1, 2, 3] = 3  # type: ignore[assignment]
    """maximum degree of spherical harmonics to use"""
    fused_rasterizer: Fusing = "auto"
    """on a GPU, form image, loss and gradients in one kernel: where it was measured to be faster, always, or never.
    Results are the same but for the rounding of sums. With bilateral grids it cannot be."""
    gradient_exchange: Literal["compact", "dense"] = "compact"
    """with several ranks, gradients of what the views' owners render: those that are not zero, or all of them. Results
    are the same to the last bit."""
    gradient_precision: Literal["float32", "bfloat16"] = "float32"
    """with several ranks, how gradients travel: as they are, or in half the bytes, each number rounded by 0.4 % at most
    (bfloat16, compact only)"""
    init_from: Path | None = None
    """start from these Gaussians: a checkpoint of bytesplat or splatfacto (.ckpt), a .ply or an .spz. With
    --max-num-iterations 0 they become a run as they are, for the viewer, ns-eval, ns-render and ns-export."""
    init_frame: Literal["training", "original"] = "training"
    """frame of the Gaussians to start from: of training, as ns-export writes it, or the original one of the capture"""

    def forget_start(self) -> None:
        """For a model that will be loaded from a checkpoint: leaves the file alone that its run began with."""
        self.init_from, self.init_frame = None, "training"


class ByteSplatModel(SplatfactoModel):
    """Gaussians, their options, and rendering of single views.

    The parameters keep splatfacto's names and shapes (``gauss_params``), so that stock tools find them.
    """

    config: ByteSplatModelConfig

    def populate_modules(self) -> None:
        config = self.config
        if config.max_gaussians < 1:
            raise ValueError(f"max-gaussians is {config.max_gaussians}; it must be at least 1.")
        refuse_random_start(config, self.seed_points is not None)
        seed = torch.initial_seed() % 2**31
        self.initial_sh_degree = 0
        parameters = self._initial_parameters(seed)
        ids = torch.arange(len(parameters["means"]), dtype=torch.int64)
        if (group := ranks.of_process()).size > 1:  # every Gaussian has one owner
            own = own_part(parameters["means"], ids, group)
            parameters, ids = {name: rows[own] for name, rows in parameters.items()}, ids[own]
        self.gauss_params = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in parameters.items()})
        self.register_buffer("ids", ids)
        self.seed_points = None  # not needed any more; may be millions of points

        self.camera_optimizer = config.camera_optimizer.setup(num_cameras=self.num_train_data, device="cpu")
        if config.use_bilateral_grid:
            x, y, w = config.grid_shape
            self.bil_grids = BilateralGrid(num=self.num_train_data, grid_X=x, grid_Y=y, grid_W=w)
        self.ssim = SSIM(data_range=1.0, size_average=True, channel=3)
        self.lpips = Lpips()
        self.crop_box: OrientedBox | None = None
        random = config.background_color == "random"
        self.background_color = torch.tensor(VIEWER_BACKGROUND) if random else get_color(config.background_color)
        self._backgrounds: tuple[int, Tensor] | None = None  # number of a block, and its colours
        self.render_for_viewer: Callable[..., dict[str, Tensor]] | None = None  # for threads that may not
        self.seed = seed
        self.images_seen = 0
        self.settle: Callable[[], None] = lambda: None  # brings updates to the present that training has put off
        self.timeline = Timeline(REFERENCE_IMAGES, config.schedule_length or REFERENCE_IMAGES)

    def _initial_parameters(self, seed: int) -> initialization.Parameters:
        config = self.config
        if config.init_from is not None:
            transform, scale = self.kwargs["metadata"]["dataparser"]
            frame = Similarity.from_dataparser(transform.numpy(), scale, "The data parser")
            antialiased = config.rasterize_mode == "antialiased"
            start = start_from(
                config.init_from, config.init_frame, frame, config.sh_degree, config.max_gaussians, antialiased
            )
            self.initial_sh_degree = start.sh_degree
            for note in start.notes:
                CONSOLE.log(note)
            return start.parameters
        if self.seed_points is None and not config.random_init:
            CONSOLE.log(
                f"The data has no point cloud: starting from {config.num_random} random Gaussians "
                f"in a cube of side {config.random_scale} around the origin."
            )
        if self.seed_points is None or config.random_init:
            count = min(config.num_random, config.max_gaussians)
            return initialization.random_cube(count, config.random_scale, config.sh_degree, seed)
        points, colors = self.seed_points
        colors = colors if colors is not None and len(colors) else None
        return initialization.from_points(points, colors, config.sh_degree, config.max_gaussians, seed)

    # What the model is at a moment of the run --------------------------------------------------------------------

    def start(self, total_images: int) -> None:
        """Lays the schedules out for a run of ``total_images`` images."""
        self.timeline = Timeline(total_images, self.config.schedule_length or max(total_images, 1))

    def gaussians(self) -> Gaussians:
        """The raw parameters, detached: stages return gradients explicitly."""
        self.settle()
        return Gaussians(**{name: p.detach() for name, p in self.gauss_params.items()}, ids=self.ids)

    def downscale(self) -> int:
        """Factor by which photos are reduced now: halved each time a ``resolution_schedule`` has passed."""
        passed = self.images_seen // self.timeline.images(self.config.resolution_schedule)
        return 2 ** max(self.config.num_downscales - passed, 0)

    def settings(self, statistics: bool = False) -> RenderSettings:
        """How views are rendered now; one more SH degree each ``sh_degree_interval``, but those it began with."""
        risen = self.images_seen // self.timeline.images(self.config.sh_degree_interval)
        degree = min(max(risen, self.initial_sh_degree), self.config.sh_degree)
        antialiased = self.config.rasterize_mode == "antialiased"
        return RenderSettings(sh_degree=degree, antialiased=antialiased, statistics=statistics)

    def training_backgrounds(self, count: int) -> Tensor:
        """[count, 3] colours behind the next views; random ones depend on (seed, images seen) alone."""
        if self.config.background_color != "random":
            return self.background_color.to(self.device).expand(count, 3).contiguous()
        block, first = divmod(self.images_seen, BACKGROUND_BLOCK)
        if self._backgrounds is None or self._backgrounds[0] != block:
            positions = torch.arange(block * BACKGROUND_BLOCK, (block + 2) * BACKGROUND_BLOCK)
            self._backgrounds = block, uniform(positions, 3, seed=self.seed, step=2).to(self.device)
        return self._backgrounds[1][first : first + count]

    # Rendering of single views ---------------------------------------------------------------------------------

    def render(self, camera: NerfstudioCameras) -> tuple[Image, Tensor]:
        """Renders one nerfstudio camera; differentiable when gradients are enabled.

        Returns:
            the image (V = 1) and the background [3] to compose it with.
        """
        poses = camera.camera_to_worlds
        if self.training and camera.metadata is not None and "cam_idx" in camera.metadata:
            corrections = self.camera_optimizer(torch.tensor([camera.metadata["cam_idx"]]))
            poses = adjust(poses, corrections.to(poses.device))
        width, height = int(camera.width.item()), int(camera.height.item())
        intrinsics = [float(v.item()) for v in (camera.fx, camera.fy, camera.cx, camera.cy)]
        cameras = Cameras(
            viewmats=world_to_camera(poses),
            intrinsics=torch.tensor([intrinsics], dtype=torch.float32, device=self.device),
            sizes=torch.tensor([[width, height]], dtype=torch.int32, device=self.device),
            width=width,
            height=height,
        )
        self.settle()
        gaussians = self._within(None if self.training else self.crop_box)
        image = self.render_gaussians(gaussians, cameras, self.settings())
        background = self.training_backgrounds(1)[0] if self.training else self.background_color.to(self.device)
        return image, background

    def get_outputs_for_camera(  # type: ignore[override]
        self, camera: NerfstudioCameras, obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        """What a camera sees, within a box. Where several ranks train, the viewer's threads have it made by all."""
        if self.render_for_viewer is not None and threading.current_thread() is not threading.main_thread():
            return self.render_for_viewer(camera, obb_box)
        return super().get_outputs_for_camera(camera, obb_box)

    def render_gaussians(self, gaussians: Gaussians, cameras: Cameras, settings: RenderSettings) -> Image:
        """Their image, differentiable; while several ranks look at their model together, ``render_together``."""
        return ops.render(gaussians, cameras, settings)[0]

    def render_for_others(self, obb_box: OrientedBox | None = None) -> None:
        """Takes part in what other ranks render within a box, without a view of one's own."""
        self.render_gaussians(self._within(obb_box), None, self.settings())

    def _within(self, box: OrientedBox | None) -> Gaussians:
        """The parameters, with their graph, of what lies in a box."""
        if box is None:
            return Gaussians(**dict(self.gauss_params.items()), ids=self.ids)
        inside = box.within(self.means).squeeze(-1)
        return Gaussians(**{k: p[inside] for k, p in self.gauss_params.items()}, ids=self.ids[inside])

    def get_outputs(self, camera: NerfstudioCameras) -> dict[str, Tensor]:  # type: ignore[override]
        """What a camera sees: rgb [H, W, 3], depth [H, W, 1], accumulation [H, W, 1], background [3] or [H, W, 3]."""
        if not isinstance(camera, NerfstudioCameras):
            raise TypeError(f"bytesplat renders nerfstudio Cameras, found {type(camera).__name__}.")
        if camera.shape != torch.Size([1]):
            camera = camera.reshape((1,))
        factor = self.downscale() if self.training else 1
        camera.rescale_output_resolution(1 / factor)
        image, background = self.render(camera)
        camera.rescale_output_resolution(factor)
        transmittance, accumulation = image.transmittance[0, ..., None], 1 - image.transmittance[0, ..., None]
        rgb = (image.rgb[0] + transmittance * background).clamp(0, 1)
        if self.training and self.config.use_bilateral_grid and camera.metadata and "cam_idx" in camera.metadata:
            rgb = self.apply_grids(rgb[None], [camera.metadata["cam_idx"]])[0]
        depth = None
        if not self.training or self.config.output_depth_during_training:
            expected = image.depth[0, ..., None] / accumulation.clamp_min(1e-10)
            depth = torch.where(accumulation > 0, expected, expected.detach().max())
        if not self.training:
            background = background.expand_as(rgb)
        return {"rgb": rgb, "depth": depth, "accumulation": accumulation, "background": background}  # type: ignore

    def apply_grids(self, rgb: Tensor, indices: list[int]) -> Tensor:
        """Maps colours [V, H, W, 3] through the bilateral grids of photos ``indices`` (Wang et al. 2024)."""
        _, height, width, _ = rgb.shape
        down, across = (torch.linspace(0, 1, side, device=rgb.device) for side in (height, width))
        y, x = torch.meshgrid(down, across, indexing="ij")
        xy = torch.stack([x, y], dim=-1)[None]
        graded = [
            slice_grid(self.bil_grids, xy, rgb[v : v + 1], torch.tensor([[index]], device=rgb.device))["rgb"]
            for v, index in enumerate(indices)
        ]
        return torch.cat(graded)

    # Evaluation ------------------------------------------------------------------------------------------------

    def get_metrics_dict(self, outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore
        target = self._target(outputs, batch)
        metrics: dict[str, Any] = {"psnr": -10 * (outputs["rgb"] - target).square().mean().log10()}
        metrics["gaussian_count"] = self.num_points
        self.camera_optimizer.get_metrics_dict(metrics)
        return metrics

    def get_image_metrics_and_images(self, outputs, batch):  # type: ignore[no-untyped-def]
        """PSNR, SSIM, LPIPS of a rendered view, and photo and render side by side [H, 2 W, 3]."""
        target, rendered = self._target(outputs, batch), outputs["rgb"]
        as_batch = lambda image: image.permute(2, 0, 1)[None]  # noqa: E731
        metrics = view_metrics(as_batch(rendered), as_batch(target), self.ssim, self.lpips)
        if self.config.color_corrected_metrics:
            corrected = color_correct(rendered, target)
            metrics |= view_metrics(as_batch(corrected), as_batch(target), self.ssim, self.lpips, prefix="cc_")
        return metrics, {"img": torch.cat([target, rendered], dim=1)}

    def _target(self, outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> Tensor:
        return self.composite_with_background(self.get_gt_img(batch["image"]), outputs["background"])

    def _downscale_if_required(self, image: Tensor) -> Tensor:
        from nerfstudio.models.splatfacto import resize_image

        factor = self.downscale() if self.training else 1
        return resize_image(image, factor) if factor > 1 else image

    # Stock surface ---------------------------------------------------------------------------------------------

    @property
    def colors(self) -> Tensor:
        """[N, 3] base colours in 0..1 (before clamping)."""
        return self.features_dc * initialization.SH_C0 + 0.5

    @property
    def shs_0(self) -> Tensor:
        """[N, 3] constant SH coefficients (at every maximum degree: there is no special case for degree zero)."""
        return self.features_dc

    def get_training_callbacks(self, _: TrainingCallbackAttributes) -> list[TrainingCallback]:
        return []  # a round is one story in pipeline.py

    def get_extra_state(self) -> dict[str, int]:
        return {
            "images_seen": self.images_seen,
            "total": self.timeline.total,
            "length": self.timeline.length,
            "initial_sh_degree": self.initial_sh_degree,
        }

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.images_seen = state["images_seen"]
        self.initial_sh_degree = state.get("initial_sh_degree", 0)  # files of earlier versions lack it
        self.timeline = Timeline(state["total"], state["length"])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self.settle()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state: dict[str, Any], **kwargs: Any):  # type: ignore[override]
        """Loads parameters of any number of Gaussians; without a record of progress the model counts as trained."""
        self.settle()
        count = len(state["gauss_params.means"])
        for name, parameter in self.gauss_params.items():
            shape = (count, *parameter.shape[1:])
            self.gauss_params[name] = torch.nn.Parameter(torch.zeros(shape, device=self.device))
        self.ids = torch.arange(count, dtype=torch.int64, device=self.device)
        if "_extra_state" not in state:
            self.images_seen = self.timeline.total
        return Model.load_state_dict(self, state, **kwargs)
