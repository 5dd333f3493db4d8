"""One kernel for image, loss and gradient rows gives what the three kernels give."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from backends import Backend, _moved
from cases import SCENES, Photo, Scene, ball, look
from oracle import photo_inputs
from torch import Tensor

from bytesplat_ns.ops import compile_check, nvrtc, residency
from bytesplat_ns.ops import cuda as stages
from bytesplat_ns.ops.cuda import ahead, fused_raster
from bytesplat_ns.ops.layout import ABSGRAD, CONIC, MEAN2D, OPACITY, RGB, RenderSettings
from bytesplat_ns.ops.photometric import PhotometricLoss

cuda = pytest.mark.parametrize("backend", ["cuda"], indirect=True)

LOSS, ROWS = 1e-6, 1e-4
"""Relative differences from the separate kernels: sums are formed in another order."""

FEW = 48
"""Records that may stay on chip in most tests, so that lists of these small scenes do not fit either."""

ROOMY = 160
"""Records for which 48 KiB of shared memory have room, with sums of 11 bits."""

TENSORS = MEAN2D, CONIC, slice(OPACITY, OPACITY + 1), RGB, ABSGRAD, slice(ABSGRAD.stop, None)
"""Columns of a row that are compared by their common norm."""

CANCELLED = 1e-2
"""Part of the largest norm below which a norm says what has cancelled, not how large the sum's terms were."""


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shared memory for FEW records."""
    monkeypatch.setattr(residency, "slots_for", lambda *arguments: FEW)
    monkeypatch.setattr(residency, "FEWEST_SLOTS", FEW)
    residency.budget.cache_clear()
    yield
    residency.budget.cache_clear()


def photo_loss(scene: Scene, photo: Photo, device: str) -> PhotometricLoss:
    """A loss on the scene's cameras, with the photo's kind of target and mask."""
    sizes = tuple((width, height) for width, height in scene.cameras.sizes.tolist())
    inputs = _moved({k: v for k, v in photo_inputs(replace(photo, sizes=sizes)).items() if k != "image"}, device)
    return PhotometricLoss(cameras=_moved(scene.cameras, device), **inputs)


def assert_rows_agree(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape and ours.isfinite().all()
    norms = torch.stack([theirs[:, columns].norm() for columns in TENSORS])
    apart = torch.stack([(ours - theirs)[:, columns].norm() for columns in TENSORS])
    assert (apart <= ROWS * norms.clamp(min=CANCELLED * float(norms.max()))).all(), f"{apart} of {norms}"


def compare(
    scene: Scene, photo: Photo, device: str, exact: bool = True, count: bool = False
) -> fused_raster.Residency | None:
    """Both ways on the same records; what the kernel says of its lists, if asked."""
    gaussians, cameras = _moved(scene.gaussians, device), _moved(scene.cameras, device)
    loss = photo_loss(scene, photo, device)
    records = stages.project(gaussians, cameras, scene.settings)
    tiles = stages.bin(records, cameras)
    image = stages.rasterize(records, tiles, cameras, scene.settings)
    losses, gradients = loss(image)
    rows = stages.rasterize_backward(records, tiles, cameras, scene.settings, image, gradients, exact=exact)

    ours, values, ours_rows = fused_raster.rasterize_photometric(
        records, tiles, cameras, scene.settings, loss, exact=exact
    )
    assert torch.equal(ours.rgb, image.rgb) and torch.equal(ours.transmittance, image.transmittance)
    assert ours.depth is None
    torch.testing.assert_close(values, losses, rtol=LOSS, atol=1e-9)
    assert_rows_agree(ours_rows, rows)
    if not count:
        return None
    return fused_raster.residency(records, tiles, cameras, scene.settings, loss, exact=exact)[0]


PHOTO_KINDS = [  # three kernels between them: compiling one for the emulator takes some seconds
    Photo("photo", ()),
    Photo("masked_rgba", (), channels=4, masked="some"),
    Photo("float_rgba", (), channels=4, uint8=False),
    Photo("l1_only", (), ssim_lambda=0.0),
    Photo("all_masked", (), channels=4, masked="all"),
]
WHOLE = [scene for scene in SCENES.values() if scene.interval is None]


@cuda
def test_every_scene(backend: Backend, room: None) -> None:
    """The table of scenes, each with another kind of photo."""
    for number, scene in enumerate(WHOLE):
        usual = scene.settings.statistics and scene.settings.stop == "drop"
        compare(scene, PHOTO_KINDS[number % len(PHOTO_KINDS) if usual else 0], backend.device)


@cuda
def test_lists_that_fit_are_not_read_again(backend: Backend, room: None, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, photo = SCENES["odd_size"], PHOTO_KINDS[0]
    streamed = compare(scene, photo, backend.device, count=True)
    assert streamed.budget == FEW - 7 and 0 < streamed.reads_on_chip < 1
    assert streamed.tiles_within < 1 and streamed.median <= streamed.percentile_95 <= streamed.longest
    assert streamed.longest > streamed.budget and f"{streamed.reads_on_chip:.1%}" in str(streamed)
    monkeypatch.setattr(residency, "slots_for", lambda *arguments: ROOMY)
    residency.budget.cache_clear()
    resident = compare(scene, photo, backend.device, exact=False, count=True)
    assert resident.reads_on_chip == resident.tiles_within == 1


@cuda
def test_faster_sums_over_pixels(backend: Backend, room: None) -> None:
    """The products of 11 bits of the separate kernel, on the same numbers."""
    compare(SCENES["without_statistics"], PHOTO_KINDS[0], backend.device, exact=False)


@cuda
def test_random_scenes(backend: Backend, room: None) -> None:
    """Sizes, counts and masks at random; blocks that take turns in whatever order the GPU likes."""
    generator = torch.Generator().manual_seed(0)
    for number in range(10_000 if backend.device == "cuda" else 12):
        width, height, count, kind = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((1, 120), (1, 120), (0, 300), (0, 2))
        )
        scene = Scene("", ball(count, number, degree=0), look((width, height)), RenderSettings(sh_degree=0))
        compare(scene, PHOTO_KINDS[kind], backend.device)


@cuda
def test_many_tiles_and_one_that_is_far_heavier(backend: Backend, room: None) -> None:
    """A hundred times the records of the other tiles, all faint, so that none of them is behind a saturated pixel."""
    heavy, light = ball(600, 1, degree=0, spread=0.004, scale=0.004, logit=-4.0), ball(25, 2, degree=0)
    parts = {name: torch.cat([getattr(heavy, name), getattr(light, name)]) for name in heavy.PARAMETERS}
    gaussians = replace(heavy, **parts, ids=torch.arange(625))
    size = (1000, 700) if backend.device == "cuda" else (200, 60)
    scene = Scene("", gaussians, look(size), RenderSettings(sh_degree=0))
    found = compare(scene, PHOTO_KINDS[0], backend.device, count=True)
    assert found.longest > 100 * max(found.median, 1)


@cuda
def test_as_few_blocks_as_are_needed(backend: Backend, room: None, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The bound of ``fused.cu`` is enough, on images of any shape; much less is not, and does not go unnoticed."""
    if backend.device == "cuda":
        pytest.skip("a GPU runs as many blocks at a time as it likes")
    for size, needed in (((200, 33), 9), ((33, 200), 9), ((150, 12), 5)):
        scene = Scene("", ball(120, 3, degree=0), look(size), RenderSettings(sh_degree=0))
        assert fused_raster.needed(scene.cameras) == needed
        monkeypatch.setenv("EMULATED_BLOCKS", str(needed))
        compare(scene, PHOTO_KINDS[0], backend.device)
    monkeypatch.setenv("EMULATED_BLOCKS", "2")
    said = tmp_path / "said"
    child = os.fork()
    if child == 0:  # the emulator stops the process
        faulthandler.disable()
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
        compare(scene, PHOTO_KINDS[0], backend.device)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and "blocks wait for one another" in said.read_text()


@cuda
def test_images_too_large_for_the_gpu(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Used where it was measured to be faster and cannot get stuck; who insists is told why it is impossible."""
    scene = SCENES["odd_size"]
    device, settings = torch.device(backend.device), scene.settings
    loss = photo_loss(scene, PHOTO_KINDS[0], backend.device)
    monkeypatch.setattr(fused_raster, "FASTER", frozenset({fused_raster.capability(device)}))
    large = replace(scene.cameras, width=20_000, height=20_000)
    assert fused_raster.chosen(device, scene.cameras, settings, loss)
    assert not fused_raster.chosen(device, large, settings, loss)
    assert not fused_raster.chosen(device, scene.cameras, settings, replace(loss, fusing="off"))
    assert fused_raster.chosen(device, large, settings, replace(loss, fusing="on"))
    records = stages.project(*_moved((scene.gaussians, scene.cameras), backend.device), settings)
    tiles = stages.bin(records, _moved(scene.cameras, backend.device))
    with pytest.raises(ValueError, match="20000 x 20000"):
        fused_raster.rasterize_photometric(records, tiles, _moved(large, backend.device), settings, loss)


@cuda
@pytest.mark.parametrize("name", ["odd_size", "views_of_different_sizes", "behind"])
def test_stages_ahead_of_their_counts(backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are too short are noticed, and the step is what it is with three kernels."""
    scene = SCENES[name]
    gaussians, cameras = _moved((scene.gaussians, scene.cameras), backend.device)
    loss = photo_loss(scene, PHOTO_KINDS[1], backend.device)
    for capacity in (ahead.record_capacity, ahead.pair_capacity):
        monkeypatch.setattr(capacity, "_needed", {})
        monkeypatch.setattr(capacity, "SMALLEST", 7)
    one = ahead.differentiate(gaussians, cameras, scene.settings, replace(loss, fusing="on"), exact=True)
    three = ahead.differentiate(gaussians, cameras, scene.settings, replace(loss, fusing="off"), exact=True)
    assert one.image.depth is None and three.image.depth is not None
    torch.testing.assert_close(one.losses, three.losses, rtol=LOSS, atol=1e-9)
    assert_rows_agree(one.rows, three.rows)


def test_what_a_tile_needs_of_shared_memory() -> None:
    """The budget's rule knows what the kernel declares."""
    for program, constants in compile_check.fused_variants("sm_90"):
        [(_, _, shared, _, _)] = compile_check.compile_for(program, constants, "sm_90")
        records = constants["SLOTS"] * 4 * residency.RECORD_BYTES
        working = residency.working_space(bool(constants["STATISTICS"]), bool(constants["SPLIT"]))
        assert shared <= records + working < shared + 64
        assert constants["BLOCKS"] * (shared + 1024 + 127) <= 228 << 10
    small = nvrtc.SharedMemory(multiprocessor=100 << 10, block=48 << 10, reserved=1 << 10)
    assert residency.slots_for(small, 3, True, False) >= residency.FEWEST_SLOTS
