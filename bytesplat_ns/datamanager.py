"""Training views in rounds; evaluation views one by one, as stock nerfstudio wants them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.datamanagers.full_images_datamanager import (
    FullImageDatamanager,
    FullImageDatamanagerConfig,
)
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track

from bytesplat_ns.ops import layout
from bytesplat_ns.parallel import ranks
from bytesplat_ns.parallel.sharing import Consolidation, Footprints, Sharing, share
from bytesplat_ns.photos import descriptions as sources
from bytesplat_ns.photos import parsing
from bytesplat_ns.photos.cache import GIB, PhotoCache
from bytesplat_ns.photos.dataset import PinholeDataset
from bytesplat_ns.photos.images import PhotoError
from bytesplat_ns.rounds import Plan, Round, View, epoch_order
from bytesplat_ns.run.progress import tell
from bytesplat_ns.views import world_to_camera

T = TypeVar("T")

SAMPLE = 32
"""Training views that are enough to tell what Gaussians cost."""


@dataclass
class ByteSplatDataManagerConfig(FullImageDatamanagerConfig):
    """Configuration of the data."""

    _target: type = field(default_factory=lambda: ByteSplatDataManager)
    views_per_round: int | None = None
    """Views in one optimizer step (default: one for each rank). All schedules count images, so more views a step make
    fewer steps."""
    consolidate_views: Consolidation = "auto"
    """What rounds of several views are filled with: views that show different parts of the scene, so that ranks which
    have these parts do not wait for each other ("on"); such views if that makes few rounds more ("auto"); or one view
    that each part shows most of ("off")."""
    image_cache_gib: float | None = None
    """Memory for decoded photos, GiB a split (default: a quarter of the GPU's free memory, else half of the host's)."""
    cache_images: Literal["auto", "cpu", "gpu"] = "auto"
    """Where decoded photos stay: on the device if all fit, else in host memory (auto, gpu), or only there (cpu)."""
    cache_images_type: Literal["uint8", "float32"] = "uint8"
    """Type of the images that stock nerfstudio code is given; photos are kept as uint8 in either case."""
    max_thread_workers: int | None = None
    """Threads that decode photos (default: one per CPU, at most 16)."""


class ByteSplatDataManager(FullImageDatamanager[PinholeDataset]):
    """Hands out `Round`s of training views, and evaluation views one by one.

    What comes next depends on the seed and on the number given with the request (images seen, or the step), never on
    earlier requests or on the number of ranks: runs resume exactly, and ranks agree without communication.
    """

    config: ByteSplatDataManagerConfig
    train_dataset: PinholeDataset
    eval_dataset: PinholeDataset

    def __init__(
        self,
        config: ByteSplatDataManagerConfig,
        device: torch.device | str = "cpu",
        test_mode: Literal["test", "val", "inference"] = "val",
        **kwargs: Any,
    ) -> None:
        self.ranks = ranks.of_process()
        self._shared = self._resumed = False
        if config.data is not None:
            config.dataparser.data = Path(config.data)
        self._source = sources.read(config.dataparser)
        if self._source is not None:
            parsing.check_poses(self._source)
            parsing.adapt(config.dataparser, self._source)
            if test_mode == "val" and self._source.point_cloud is not None:  # the other modes do not train
                sources.check_point_cloud(self._source.point_cloud)
        with parsing.explained(config.dataparser):
            super().__init__(config, device, test_mode, **kwargs)

    def next_round(self, position: int, downscale: int = 1) -> Round:
        """The views of the next optimizer step, in one order on any number of ranks, which is that of their owners.

        Args:
            position: images seen so far.
            downscale: photos are reduced to 1 / downscale of their size, and cameras with them.
        """
        plan, planned, owners = self.sharing.plan, self.sharing.planned_owners, self.owners
        order = sorted(plan.round_at(position), key=lambda index: (owners[index], planned[index]))
        views = [self.view(index, downscale) for index in order]
        coming = plan.round_at(position + len(views))
        self.train_photos.prefetch(index for index in coming if owners[index] == self.ranks.rank)
        return Round(views, position)

    @property
    def views_per_round(self) -> int:
        """Views in one optimizer step."""
        configured = self.config.views_per_round
        return self.ranks.size if configured is None else configured

    @cached_property
    def sharing(self) -> Sharing:
        """Which views a round has; in their order until ``share_views``."""
        return Sharing.alone(Plan(self.seed, len(self.train_dataset), self.views_per_round))

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank that each training view belongs to; the first has all until ``share_views``."""
        return (0,) * len(self.train_dataset)

    def share_views(self, position: int, footprints: Footprints) -> None:
        """Plans the rounds from ``position`` (images seen) on. The first time, gives views to ranks."""
        consolidate = self.config.consolidate_views
        if self._resumed:
            self._resumed = False
        elif not (self._shared and (consolidate == "off" or self.sharing.plan.ranks == 1)):
            owners = self.sharing.planned_owners if self._shared else None
            self.sharing = share(self.sharing.plan, position, footprints, self.views_per_round, consolidate, owners)
        if not self._shared and self.ranks.size > 1:
            self.owners = self.sharing.owners_among(self.ranks.size, footprints)
            _fill(self.train_photos, self._owned())
        self._shared = True

    def rounds_state(self, position: int) -> dict[str, Any] | None:
        """What a checkpoint needs to go on with the rounds of now; None where position and seed say it all."""
        plan = self.sharing.plan
        within = plan.left is not None and position // plan.count == plan.begin // plan.count
        return None if plan.ranks == 1 and not within else self.sharing.state_dict()

    def load_rounds(self, state: Mapping[str, Any] | None, position: int) -> None:
        """Goes on with the rounds of a checkpoint; if these had another number of views, with those left over."""
        former = None if state is None else Sharing.from_state(state)
        size, now = 1 if former is None else former.plan.views_per_round, self.views_per_round
        if size != now:
            tell(
                f"Rounds had {size} views so far and have {now} from here on. To go on as if nothing had happened, "
                f"give --pipeline.datamanager.views-per-round {size}."
            )
        if former is None or former.plan.count != len(self.train_dataset):  # or other photos
            return
        self._resumed = size == now
        alone = {"seed": self.seed, "views_per_round": now, "ranks": 1, "occupied": None}
        self.sharing = former if self._resumed else Sharing.alone(former.plan.followed(position, **alone))

    def training_cameras(self, device: torch.device, sample: int | None = None) -> layout.Cameras:
        """All training views as the stages take them, or ``SAMPLE`` of them at most, drawn from a number."""
        cameras, count = self.train_dataset.cameras, len(self.train_dataset)
        chosen = torch.arange(count) if sample is None else torch.tensor(epoch_order(self.seed, sample, count)[:SAMPLE])
        columns = (cameras.fx, cameras.fy, cameras.cx, cameras.cy)
        sizes = torch.cat([cameras.width[chosen], cameras.height[chosen]], dim=1).int()
        return layout.Cameras(
            viewmats=world_to_camera(cameras.camera_to_worlds[chosen]).to(device),
            intrinsics=torch.cat([column[chosen] for column in columns], dim=1).float().to(device),
            sizes=sizes.to(device),
            width=int(sizes[:, 0].max()),
            height=int(sizes[:, 1].max()),
        )

    def _owned(self) -> list[int]:
        """Training views that this rank owns."""
        return [index for index, owner in enumerate(self.owners) if owner == self.ranks.rank]

    @cached_property
    def _pinholes(self) -> list[tuple[torch.Tensor, float, float, float, float, int, int]]:
        """Pose [3, 4], fx, fy, cx, cy, width and height of every training camera, of the size of its photo."""
        cameras = self.train_dataset.cameras
        numbers = (cameras.fx, cameras.fy, cameras.cx, cameras.cy, cameras.width, cameras.height)
        return list(zip(cameras.camera_to_worlds, *(n.flatten().tolist() for n in numbers), strict=True))

    def view(self, index: int, downscale: int) -> View:
        """A training view at 1 / downscale of its size, with its photo if this rank owns it."""
        owner = self.owners[index]
        photo = self.train_photos[index] if owner == self.ranks.rank else None
        pose, fx, fy, cx, cy, width, height = self._pinholes[index]
        if min(height, width) < downscale:
            raise PhotoError(
                f"{self.train_dataset.image_filenames[index]} has {width}x{height} pixels, too few to train at "
                f"1/{downscale} of its size at first: lower --pipeline.model.num-downscales, or remove its frame."
            )
        photo = None if photo is None else photo.downscale(downscale)
        return View(
            index=index,
            owner=owner,
            camera_to_world=pose,
            fx=fx / downscale,
            fy=fy / downscale,
            cx=cx / downscale,
            cy=cy / downscale,
            width=width // downscale,
            height=height // downscale,
            image=None if photo is None else photo.image,
            mask=None if photo is None else photo.mask,
        )

    @property
    def seed(self) -> int:
        """The seed of all choices of views."""
        return self.config.train_cameras_sampling_seed

    # Photos ---------------------------------------------------------------------------------------------------

    @cached_property
    def train_photos(self) -> PhotoCache:
        """The training photos, on the training device whenever one is asked for. A rank keeps those it owns."""
        return self._photos("training", self.train_dataset, self._owned())

    @cached_property
    def eval_photos(self) -> PhotoCache:
        """The evaluation photos, likewise."""
        return self._photos("evaluation", self.eval_dataset, range(len(self.eval_dataset)))

    def _photos(self, split: str, dataset: PinholeDataset, own: Sequence[int]) -> PhotoCache:
        """An empty cache for a split's own photos. Reads their headers, so that what does not fit is found early."""
        workers = self.config.max_thread_workers or min(16, os.cpu_count() or 1)
        nbytes = [0] * len(dataset)
        with ThreadPoolExecutor(workers) as pool:
            for index, size in zip(own, pool.map(dataset.nbytes, own), strict=True):
                nbytes[index] = size
        gib = self.config.image_cache_gib
        photos = PhotoCache(
            dataset.photo,
            nbytes,
            self.device,
            budget=None if gib is None else int(gib * GIB),
            host_only=self.config.cache_images == "cpu",
            workers=workers,
        )
        CONSOLE.print(f"{split.capitalize()}: {photos.describe()}")
        return photos

    def setup_train(self) -> None:
        """Decodes the photos before training starts, those of a split that fits in memory.

        Evaluation photos too: a run should not stop at the first, or last, evaluation for one that cannot be read.
        """
        if self.test_mode != "val":  # "test" and "inference" do not train
            return
        if self.ranks.size == 1:  # several ranks decode photos once they know which are theirs
            _fill(self.train_photos, self._owned())
        if len(self.eval_dataset):
            _fill(self.eval_photos, range(len(self.eval_dataset)))  # whose budget is what the training photos left

    # Stock surface --------------------------------------------------------------------------------------------

    def create_train_dataset(self) -> PinholeDataset:
        """The training split, which must not be empty."""
        if self.views_per_round < 1:
            raise ValueError(f"views_per_round is {self.views_per_round}; it must be at least 1.")
        if not self.train_dataparser_outputs.image_filenames:
            raise ValueError(
                f"No training photos in {self.get_datapath()}: the data parser found none for the split 'train'. "
                f"Check its eval mode, or train_filenames in transforms.json."
            )
        self._correct(self.train_dataparser_outputs)
        if self.test_mode == "val" and self._source is not None:
            parsing.check_points(self.train_dataparser_outputs, self._source)
        return super().create_train_dataset()

    def create_eval_dataset(self) -> PinholeDataset:
        """The evaluation split, which may be empty."""
        outputs = self.dataparser.get_dataparser_outputs(split=self.test_split)
        self._correct(outputs)
        return PinholeDataset(outputs, scale_factor=self.config.camera_res_scale_factor)

    def _correct(self, outputs: DataparserOutputs) -> None:
        if self._source is not None:
            parsing.correct(outputs, self._source)
        metadata = outputs.cameras.metadata or {}
        if "fisheye_crop_radius" in metadata:  # pixels of the photos before any were reduced
            metadata["fisheye_crop_radius"] /= getattr(self.dataparser, "downscale_factor", None) or 1

    def sample_train_cameras(self) -> list[int]:
        """The first epoch's order; the stock constructor keeps such a list, which nothing here reads."""
        strategy = self.config.train_cameras_sampling_strategy
        if strategy != "random":
            raise ValueError(
                f"train_cameras_sampling_strategy is '{strategy}', but a round can only be drawn at random "
                f"(every photo once an epoch): use 'random'."
            )
        return list(epoch_order(self.seed, 0, len(self.train_dataset)))

    @cached_property
    def cached_train(self) -> Sequence[dict[str, Any]]:
        """Image and mask of every training photo, made when asked for."""
        return _OnDemand(len(self.train_dataset), self._train_data)

    @cached_property
    def cached_eval(self) -> Sequence[dict[str, Any]]:
        """Image and mask of every evaluation photo, made when asked for."""
        return _OnDemand(len(self.eval_dataset), self._eval_data)

    @property
    def fixed_indices_eval_dataloader(self) -> Sequence[tuple[Cameras, dict[str, Any]]]:
        """Camera [1] and data of every evaluation photo in the data set's order, made when asked for."""
        self._require_eval_photos()
        return _OnDemand(len(self.eval_dataset), self._eval_item)

    def next_train(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """Camera [1] and data of the training photo a run with one view a round shows at this step."""
        (index,) = Plan(self.seed, len(self.train_dataset), views_per_round=1).round_at(step)
        camera = self.train_dataset.cameras[index : index + 1].to(self.device)
        camera.metadata = {**(camera.metadata or {}), "cam_idx": index}
        return camera, self._train_data(index)

    def next_eval_image(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """Camera [1] and data of an evaluation photo drawn at random from (seed, step)."""
        self._require_eval_photos()
        return self._eval_item(epoch_order(self.seed, step, len(self.eval_dataset))[0])

    def get_train_rays_per_batch(self) -> int:
        """Pixels of an average training view."""
        cameras = self.train_dataset.cameras
        return int((cameras.width * cameras.height).float().mean())

    def _train_data(self, index: int) -> dict[str, Any]:
        return self.train_dataset.as_data(index, self.train_photos[index], self.config.cache_images_type)

    def _eval_data(self, index: int) -> dict[str, Any]:
        return self.eval_dataset.as_data(index, self.eval_photos[index], self.config.cache_images_type)

    def _eval_item(self, index: int) -> tuple[Cameras, dict[str, Any]]:
        return self.eval_dataset.cameras[index : index + 1].to(self.device), self._eval_data(index)

    def _require_eval_photos(self) -> None:
        if not len(self.eval_dataset):
            split = self.test_split
            raise ValueError(
                f"No evaluation photos in {self.get_datapath()}: the data parser found none for the split '{split}'. "
                f"Check its eval mode, or {split}_filenames in transforms.json."
            )


def _fill(photos: PhotoCache, own: Sequence[int]) -> None:
    """Decodes photos if they all fit."""
    if photos.complete:
        for _ in track(photos.fill(own), description="Decoding photos", total=len(own), transient=True):
            pass


class _OnDemand(Sequence[T]):
    """A list whose items are made when asked for: stock code wants lists, and photos may not all fit in memory."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> T:
        return self._make(range(self._count)[index])
