"""From the views of a round to what the kernels take: cameras in OpenCV axes and one block of ground truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bytesplat_ns.ops.layout import Cameras
from bytesplat_ns.rounds import View

PoseOptimizer = Callable[[Tensor], Tensor]
"""Learned corrections [V, 3, 4] of photos [V] by index, such as nerfstudio's CameraOptimizer."""


@dataclass
class Batch:
    """The views of a round that this rank owns, padded to the largest of them, on the model's device."""

    cameras: Cameras
    target: Tensor  # [V, H, W, 3 or 4] uint8 or float32
    mask: Tensor | None  # [V, H, W] uint8, nonzero where the loss counts
    indices: list[int]  # of the photos in the training set

    def __len__(self) -> int:
        return len(self.indices)

    def composed(self, background: Tensor) -> Tensor:
        """The photos [V, H, W, 3] in 0..1, those with alpha in front of a background [V, 3]."""
        photos = self.target.float() / 255 if self.target.dtype == torch.uint8 else self.target
        if photos.shape[-1] == 4:
            photos = photos[..., :3] * photos[..., 3:] + (1 - photos[..., 3:]) * background[:, None, None]
        return photos


def world_to_camera(camera_to_world: Tensor) -> Tensor:
    """Inverts rigid OpenGL camera-to-world poses [V, 3, 4] into OpenCV world-to-camera matrices [V, 4, 4].

    OpenGL cameras look along -z with y up, OpenCV's along +z with y down: the y and z axes change sign.
    """
    flip = camera_to_world.new_tensor([1.0, -1.0, -1.0])
    rotation = (camera_to_world[:, :3, :3] * flip).transpose(1, 2)
    translation = -rotation @ camera_to_world[:, :3, 3:]
    last = camera_to_world.new_tensor([0.0, 0.0, 0.0, 1.0]).expand(len(camera_to_world), 1, 4)
    return torch.cat([torch.cat([rotation, translation], dim=2), last], dim=1)


def adjust(camera_to_world: Tensor, corrections: Tensor) -> Tensor:
    """Applies nerfstudio's learned corrections [V, 3, 4] to poses [V, 3, 4]: rotation and translation separately."""
    return torch.cat(
        [corrections[:, :, :3] @ camera_to_world[:, :, :3], camera_to_world[:, :, 3:] + corrections[:, :, 3:]], dim=2
    )


class Collator:
    """Gathers the views of a round. Cameras stay on the device from one use to the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cameras: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._same: dict[tuple[float, ...], Tensor] = {}  # intrinsics and sizes, which photos of one camera share

    def batch(self, views: Sequence[View], cameras: Cameras, own: slice) -> Batch:
        """The views of a round whose photos are here. They may be none, and differ in size and number of channels.

        Args:
            views, cameras: all of the round.
            own: which of them this rank owns.
        """
        if len(views[own]) < len(views):
            width, height = (max((getattr(v, s) for v in views[own]), default=0) for s in ("width", "height"))
            columns = (column[own] for column in (cameras.viewmats, cameras.intrinsics, cameras.sizes))
            views, cameras = views[own], Cameras(*columns, width, height)
        photos = [view.image for view in views if view.image is not None]
        assert len(photos) == len(views), "photos are with the owners of their views"
        if not photos:
            return Batch(cameras, torch.empty(0, 0, 0, 3, dtype=torch.uint8, device=self.device), None, [])
        channels = max(photo.shape[2] for photo in photos)
        images = [_fit(photo.to(self.device), cameras.width, cameras.height, channels) for photo in photos]
        target = images[0][None] if len(images) == 1 else torch.stack(images)
        mask = None
        if any(view.mask is not None for view in views):
            mask = torch.stack([_fit_mask(view, cameras.width, cameras.height, self.device) for view in views])
        return Batch(cameras, target, mask, [view.index for view in views])

    def cameras(self, views: Sequence[View], pose_optimizer: PoseOptimizer | None = None) -> tuple[Cameras, Tensor]:
        """Cameras of the V views of a round, wherever their photos are.

        Args:
            pose_optimizer: None where poses are fixed.

        Returns:
            cameras with poses detached, for the stages return dL/d(viewmats) instead; and their viewmats [V, 4, 4]
            attached to the graph of the pose optimizer.
        """
        parts = zip(*[self._camera(view) for view in views], strict=True)
        poses, viewmats, intrinsics, sizes = (part[0] if len(part) == 1 else torch.cat(part) for part in parts)
        if pose_optimizer is not None:
            indices = torch.tensor([view.index for view in views])
            viewmats = world_to_camera(adjust(poses, pose_optimizer(indices).to(self.device)))
        width, height = max(view.width for view in views), max(view.height for view in views)
        return Cameras(viewmats.detach(), intrinsics, sizes, width, height), viewmats

    def _camera(self, view: View) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pose [1, 3, 4], viewmat [1, 4, 4], intrinsics [1, 4] and size [1, 2] of a view, on the device."""
        key = view.index, view.width, view.height  # a photo has one camera at each resolution
        if key not in self._cameras:
            pose = view.camera_to_world[None]
            poses = (tensor.contiguous().to(self.device) for tensor in (pose, world_to_camera(pose)))
            intrinsics = self._row((view.fx, view.fy, view.cx, view.cy), torch.float32)
            self._cameras[key] = (*poses, intrinsics, self._row((view.width, view.height), torch.int32))
        return self._cameras[key]

    def _row(self, numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        if numbers not in self._same:
            self._same[numbers] = torch.tensor([numbers], dtype=dtype, device=self.device)
        return self._same[numbers]


def _fit(image: Tensor, width: int, height: int, channels: int) -> Tensor:
    if image.shape[2] < channels:  # an opaque photo among photos with alpha
        opaque = 255 if image.dtype == torch.uint8 else 1.0
        image = pad(image, (0, 1), value=opaque)
    if image.shape[:2] != (height, width):
        image = pad(image, (0, 0, 0, width - image.shape[1], 0, height - image.shape[0]))
    return image.contiguous()


def _fit_mask(view: View, width: int, height: int, device: torch.device) -> Tensor:
    mask = view.mask
    if mask is None:
        mask = torch.ones(view.height, view.width, dtype=torch.uint8)
    return pad(mask.to(device), (0, width - mask.shape[1], 0, height - mask.shape[0])).contiguous()
