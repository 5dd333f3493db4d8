"""Views become cameras in OpenCV axes and one padded block of ground truth."""

import pytest
import torch

from bytesplat_ns.rounds import View
from bytesplat_ns.views import Batch, Collator, adjust, world_to_camera


def poses(count: int) -> torch.Tensor:
    """[count, 3, 4] random rigid camera-to-world poses."""
    generator = torch.Generator().manual_seed(count)
    rotation, _ = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator, dtype=torch.float64))
    rotation = rotation * torch.linalg.det(rotation)[:, None, None]
    return torch.cat([rotation, torch.randn(count, 3, 1, generator=generator, dtype=torch.float64)], dim=2)


def view(index: int, width: int, height: int, channels: int = 3, mask: bool = False) -> View:
    image = torch.full((height, width, channels), index + 1, dtype=torch.uint8)
    keep = torch.ones(height, width, dtype=torch.uint8) if mask else None
    return View(index, 0, poses(1)[0].float(), 50.0, 51.0, width / 2, height / 2, width, height, image, keep)


def batch_of(views: list[View], own: slice = slice(None)) -> Batch:
    collate = Collator(torch.device("cpu"))
    return collate.batch(views, collate.cameras(views)[0], own)


def test_world_to_camera_puts_what_a_camera_looks_at_in_front_of_it():
    pose = poses(4)
    viewmats = world_to_camera(pose)
    ahead = pose[:, :, 3] - 2.0 * pose[:, :, 2] + 0.5 * pose[:, :, 1]  # OpenGL: -z is ahead, +y is up
    homogeneous = torch.cat([ahead, torch.ones(4, 1, dtype=torch.float64)], dim=1)
    seen = (viewmats @ homogeneous[..., None])[..., 0]
    torch.testing.assert_close(seen, torch.tensor([0.0, -0.5, 2.0, 1.0], dtype=torch.float64).expand(4, 4))


def test_adjust_is_the_camera_optimizers_own_composition():
    pose, correction = poses(3), poses(3)
    both = adjust(pose, correction)
    torch.testing.assert_close(both[:, :, :3], correction[:, :, :3] @ pose[:, :, :3])
    torch.testing.assert_close(both[:, :, 3], pose[:, :, 3] + correction[:, :, 3])


def test_photos_of_different_sizes_and_channels_share_one_block():
    views = [view(0, 5, 4), view(1, 3, 6, channels=4), view(2, 2, 2, mask=True)]
    batch = batch_of(views)
    assert (batch.cameras.width, batch.cameras.height) == (5, 6)
    assert batch.cameras.sizes.tolist() == [[5, 4], [3, 6], [2, 2]]
    assert batch.target.shape == (3, 6, 5, 4)
    assert (batch.target[0, :4, :5, :3] == 1).all() and (batch.target[0, :4, :5, 3] == 255).all(), "opaque"
    assert (batch.target[0, 4:] == 0).all()
    assert (batch.target[1, :6, :3] == 2).all(), "the photo's own alpha stays"
    assert batch.mask.sum(dim=(1, 2)).tolist() == [20, 18, 4], "a photo without a mask counts in full"


def test_a_rank_has_the_photos_of_its_own_views():
    """A block is as large as they need it; a rank may have none."""
    views = [view(0, 50, 40), view(1, 3, 6), view(2, 5, 4), view(3, 70, 70)]
    views[0].image = views[3].image = None  # elsewhere
    batch = batch_of(views, slice(1, 3))
    assert batch.target.shape == (2, 6, 5, 3) and batch.indices == [1, 2] and len(batch) == 2
    assert batch.cameras.sizes.tolist() == [[3, 6], [5, 4]] and len(batch.cameras) == 2
    nothing = batch_of(views, slice(2, 2))
    assert len(nothing) == len(nothing.cameras) == len(nothing.target) == 0


def test_a_single_photo_is_not_copied():
    photo = view(0, 5, 4)
    batch = batch_of([photo])
    assert batch.mask is None
    assert batch.target.shape == (1, 4, 5, 3)
    assert batch.target.data_ptr() == photo.image.data_ptr()


def test_the_pose_optimizer_gets_its_gradient_through_the_view_matrices():
    corrections = torch.nn.Parameter(torch.eye(3, 4).repeat(3, 1, 1))
    views = [view(2, 5, 4), view(0, 5, 4)]
    cameras, viewmats = Collator(torch.device("cpu")).cameras(views, lambda indices: corrections[indices])
    assert not cameras.viewmats.requires_grad
    viewmats.backward(torch.ones(2, 4, 4))
    assert corrections.grad[1].abs().sum() == 0, "photo 1 is not in the round"
    assert corrections.grad[[0, 2]].abs().sum(dim=(1, 2)).min() > 0


@pytest.mark.parametrize("corrections", [torch.eye(3, 4)[None]])
def test_no_correction_changes_nothing(corrections):
    pose = poses(1).float()
    torch.testing.assert_close(adjust(pose, corrections), pose)


def test_a_photo_has_one_camera_at_each_resolution():
    gather = Collator(torch.device("cpu"))
    full, half = (gather.cameras([view(0, *size)])[0] for size in ((8, 6), (4, 3)))
    assert full.sizes.tolist() == [[8, 6]] and half.sizes.tolist() == [[4, 3]]
    again, _ = gather.cameras([view(0, 8, 6), view(1, 8, 6)])
    assert torch.equal(again.viewmats[:1], full.viewmats) and torch.equal(again.intrinsics[:1], full.intrinsics)
