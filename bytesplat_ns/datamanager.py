"""Training views in rounds; evaluation views one by one, as stock nerfstudio wants them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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

from bytesplat_ns.parallel import ranks
from bytesplat_ns.photos import descriptions as sources
from bytesplat_ns.photos import parsing
from bytesplat_ns.photos.cache import GIB, PhotoCache
from bytesplat_ns.photos.dataset import PinholeDataset
from bytesplat_ns.photos.images import PhotoError
from bytesplat_ns.rounds import Round, View, epoch_order, round_indices

T = TypeVar("T")


@dataclass
class ByteSplatDataManagerConfig(FullImageDatamanagerConfig):
    """Configuration of the data."""

    _target: type = field(default_factory=lambda: ByteSplatDataManager)
    views_per_round: int | None = None
    """Views in one optimizer step (default: one for each rank). All schedules count images, so more views a step make
    fewer steps."""
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
    earlier requests: runs resume exactly, and ranks agree without communication.
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
        """The views of the next optimizer step.

        Args:
            position: images seen so far.
            downscale: photos are reduced to 1 / downscale of their size, and cameras with them.
        """
        owners = self._owners(position)
        views = [self._view(index, owner, downscale) for index, owner in owners.items()]
        coming = self._owners(position + len(views))
        self.train_photos.prefetch(index for index, owner in coming.items() if owner == self.ranks.rank)
        return Round(views, position)

    @property
    def views_per_round(self) -> int:
        """Views in one optimizer step."""
        configured = self.config.views_per_round
        return self.ranks.size if configured is None else configured

    def _owners(self, position: int) -> dict[int, int]:
        """The photos of the round at ``position``, and the rank that owns the view of each."""
        indices = round_indices(self.seed, position, len(self.train_dataset), self.views_per_round)
        return {index: place % self.ranks.size for place, index in enumerate(indices)}

    def _view(self, index: int, owner: int, downscale: int) -> View:
        photo = self.train_photos[index] if owner == self.ranks.rank else None
        cameras = self.train_dataset.cameras  # of the size of their photos
        height, width = int(cameras.height[index]), int(cameras.width[index])
        if min(height, width) < downscale:
            raise PhotoError(
                f"{self.train_dataset.image_filenames[index]} has {width}x{height} pixels, too few to train at "
                f"1/{downscale} of its size at first: lower --pipeline.model.num-downscales, or remove its frame."
            )
        photo = None if photo is None else photo.downscale(downscale)
        return View(
            index=index,
            owner=owner,
            ranks=(1 << self.ranks.size) - 1,
            camera_to_world=cameras.camera_to_worlds[index],
            fx=float(cameras.fx[index]) / downscale,
            fy=float(cameras.fy[index]) / downscale,
            cx=float(cameras.cx[index]) / downscale,
            cy=float(cameras.cy[index]) / downscale,
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
        """The training photos, on the training device whenever one is asked for."""
        return self._photos("training", self.train_dataset)

    @cached_property
    def eval_photos(self) -> PhotoCache:
        """The evaluation photos, likewise."""
        return self._photos("evaluation", self.eval_dataset)

    def _photos(self, split: str, dataset: PinholeDataset) -> PhotoCache:
        """An empty cache for a split. Reads all headers, so that files that do not fit are found before training."""
        workers = self.config.max_thread_workers or min(16, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            nbytes = list(pool.map(dataset.nbytes, range(len(dataset))))
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
        _fill(self.train_photos)
        if len(self.eval_dataset):
            _fill(self.eval_photos)  # whose budget is what the training photos left

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
        (index,) = round_indices(self.seed, step, len(self.train_dataset), 1)
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


def _fill(photos: PhotoCache) -> None:
    """Decodes photos if they all fit."""
    if photos.complete:
        for _ in track(photos.fill(), description="Decoding photos", total=len(photos), transient=True):
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
