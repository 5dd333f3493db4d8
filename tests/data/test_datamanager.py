"""The data manager on small data sets made on the spot, against stock nerfstudio where stock is right."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("nerfstudio")

import tyro
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.configs.base_config import InstantiateConfig
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager, _undistort_image
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.data.utils.dataloaders import FixedIndicesEvalDataloader

from bytesplat_ns.datamanager import ByteSplatDataManager, ByteSplatDataManagerConfig
from bytesplat_ns.photos.images import PhotoError
from bytesplat_ns.photos.undistortion import LensError

WIDTH, HEIGHT, FRAMES = 40, 30, 10
EVAL_INTERVAL = 4  # frames 0, 4 and 8 are held out
DISTORTION = {"k1": -0.1, "k2": 0.02, "p1": 0.002, "p2": -0.001}


def make(folder: Path, frames: int = FRAMES, masks: bool = False, channels: int = 3, **meta) -> Path:
    """Writes a data set of random photos, whose mask, if any, hides the left third."""
    (folder / "images").mkdir()
    generator = np.random.default_rng(0)
    entries = []
    for i in range(frames):
        pixels = generator.integers(0, 256, (HEIGHT, WIDTH, channels), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"images/{i:03d}.png")
        pose = np.eye(4)
        pose[:3, 3] = generator.normal(size=3)
        entry = {"file_path": f"images/{i:03d}.png", "transform_matrix": pose.tolist()}
        if masks:
            mask = np.full((HEIGHT, WIDTH), 255, np.uint8)
            mask[:, : WIDTH // 3] = 0
            Image.fromarray(mask).save(folder / f"images/mask_{i:03d}.png")
            entry["mask_path"] = f"images/mask_{i:03d}.png"
        entries.append(entry)
    camera = {"fl_x": 35.0, "fl_y": 36.0, "cx": 20.5, "cy": 14.75, "w": WIDTH, "h": HEIGHT}
    (folder / "transforms.json").write_text(json.dumps({**camera, **meta, "frames": entries}))
    return folder


def config_of(config_type: type[InstantiateConfig], folder: Path, **options):
    dataparser = NerfstudioDataParserConfig(
        data=folder, eval_mode="interval", eval_interval=EVAL_INTERVAL, downscale_factor=1, load_3D_points=False
    )
    return config_type(dataparser=dataparser, **options)


def manager(folder: Path, test_mode: str = "val", **options) -> ByteSplatDataManager:
    return config_of(ByteSplatDataManagerConfig, folder, **options).setup(device="cpu", test_mode=test_mode)


def pixels(folder: Path, frame: int) -> np.ndarray:
    return np.asarray(Image.open(folder / f"images/{frame:03d}.png"))


TRAIN_FRAMES = [i for i in range(FRAMES) if i % EVAL_INTERVAL]


def test_is_what_stock_tools_ask_for(tmp_path):
    data = manager(make(tmp_path))
    assert isinstance(data, FullImageDatamanager)
    assert data.get_datapath() == tmp_path
    assert data.get_train_rays_per_batch() == WIDTH * HEIGHT
    assert data.get_param_groups() == {}
    assert len(data.train_dataset) == len(TRAIN_FRAMES)
    assert len(data.cached_train) == len(TRAIN_FRAMES)
    assert data.config.setup(device="cpu").config is data.config


def test_options_appear_on_the_command_line():
    config = tyro.cli(ByteSplatDataManagerConfig, args=["--views-per-round", "4", "--image-cache-gib", "2.5"])
    assert config.views_per_round == 4
    assert config.image_cache_gib == 2.5
    assert config._target is ByteSplatDataManager


@pytest.mark.parametrize("cache_gib", [None, 0.0])
def test_rounds_show_every_photo_once_an_epoch(tmp_path, cache_gib):
    data = manager(make(tmp_path), views_per_round=3, image_cache_gib=cache_gib)
    position, seen = 0, []
    while position < 2 * len(TRAIN_FRAMES):
        round = data.next_round(position, downscale=1)
        assert round.position == position
        position += len(round.views)
        for view in round.views:
            assert (view.owner, view.mask) == (0, None)
            np.testing.assert_array_equal(view.image.numpy(), pixels(tmp_path, TRAIN_FRAMES[view.index]))
            assert view.camera_to_world.equal(data.train_dataset.cameras.camera_to_worlds[view.index])
        seen += [view.index for view in round.views]
    assert sorted(seen) == sorted(2 * list(range(len(TRAIN_FRAMES))))
    again = manager(tmp_path, views_per_round=3)
    assert [view.index for view in again.next_round(9, 1).views] == seen[9:12]


def test_seed_changes_the_order(tmp_path):
    make(tmp_path)
    orders = [
        [manager(tmp_path, train_cameras_sampling_seed=seed).next_round(i, 1).views[0].index for i in range(6)]
        for seed in (42, 43)
    ]
    assert orders[0] != orders[1]


def test_downscaled_cameras_are_nerfstudios(tmp_path):
    data = manager(make(tmp_path))
    (view,) = data.next_round(0, downscale=4).views
    camera = data.train_dataset.cameras[view.index : view.index + 1].to("cpu")
    camera.rescale_output_resolution(1 / 4)
    for name in ("fx", "fy", "cx", "cy", "width", "height"):
        assert getattr(view, name) == pytest.approx(float(getattr(camera, name)), rel=1e-6), name
    assert view.image.shape == (HEIGHT // 4, WIDTH // 4, 3)


def test_masks_and_alpha_reach_rounds_and_stock_code(tmp_path):
    data = manager(make(tmp_path, masks=True, channels=4), cache_images_type="float32")
    (view,) = data.next_round(0, downscale=1).views
    assert view.image.shape == (HEIGHT, WIDTH, 4)
    assert view.mask.dtype == torch.uint8
    assert not view.mask[:, : WIDTH // 3].any() and view.mask[:, WIDTH // 3 :].all()
    (half,) = data.next_round(0, downscale=2).views
    assert half.mask.shape == half.image.shape[:2] == (HEIGHT // 2, WIDTH // 2)
    for camera, batch in (data.next_train(0), data.next_eval(0), data.fixed_indices_eval_dataloader[0]):
        assert camera.shape == (1,)
        assert batch["image"].dtype == torch.float32 and batch["image"].max() == 1.0
        assert batch["mask"].dtype == torch.bool
        assert batch["mask"].shape == (HEIGHT, WIDTH, 1)


def test_next_train_names_its_photo(tmp_path):
    data = manager(make(tmp_path))
    for step in (0, 3, 8):
        camera, batch = data.next_train(step)
        (view,) = data.next_round(step, 1).views
        assert camera.metadata["cam_idx"] == batch["image_idx"] == view.index
        assert batch["image"].equal(view.image)


def test_evaluation_is_deterministic(tmp_path):
    data, again = manager(make(tmp_path)), manager(tmp_path, test_mode="test")
    again.next_eval_image(7)
    drawn = [data.next_eval_image(step)[1]["image_idx"] for step in range(0, 2000, 100)]
    assert drawn == [again.next_eval_image(step)[1]["image_idx"] for step in range(0, 2000, 100)]
    assert set(drawn) == {0, 1, 2}
    for _ in range(2):
        views = list(data.fixed_indices_eval_dataloader)
        assert [batch["image_idx"] for _, batch in views] == [0, 1, 2]
        for (camera, batch), frame in zip(views, (0, 4, 8), strict=True):
            np.testing.assert_array_equal(batch["image"].numpy(), pixels(tmp_path, frame))
            assert camera.camera_to_worlds[0].equal(data.eval_dataset.cameras.camera_to_worlds[batch["image_idx"]])


@pytest.mark.parametrize(
    "meta", [DISTORTION, {"camera_model": "OPENCV_FISHEYE", "k1": 0.02}], ids=["opencv", "fisheye"]
)
def test_undistortion_is_nerfstudios(tmp_path, meta):
    """Stock computes intrinsics in float32, hence 1e-4, and a fisheye's maps too, hence one level of 255."""
    data = manager(make(tmp_path, **meta))
    for dataset, frames in ((data.train_dataset, TRAIN_FRAMES), (data.eval_dataset, [0, 4, 8])):
        original = dataset._dataparser_outputs.cameras
        for index in (1, 0, 2):  # cameras are final before and whichever photos are read
            camera = original[index]
            stock_matrix, stock_image, _ = _undistort_image(
                camera,
                camera.distortion_params.numpy(),
                {},
                pixels(tmp_path, frames[index]),
                camera.get_intrinsics_matrices().numpy(),
            )
            ours = dataset.cameras[index]
            np.testing.assert_allclose(ours.get_intrinsics_matrices().numpy(), stock_matrix, rtol=1e-4)
            assert (int(ours.height), int(ours.width)) == stock_image.shape[:2]
            assert ours.camera_type == CameraType.PERSPECTIVE.value
            assert not ours.distortion_params.any()
            inner = (slice(1, -1), slice(1, -1))  # at the edge stock mixes in black
            difference = dataset.photo(index).image.numpy().astype(int)[inner] - stock_image[inner]
            assert np.abs(difference).max() <= 1


def test_fisheye_without_coefficients_is_no_pinhole(tmp_path):
    """An equidistant lens: stock leaves such photos bent."""
    data = manager(make(tmp_path, camera_model="OPENCV_FISHEYE"))
    camera = data.train_dataset.cameras[0]
    assert camera.camera_type == CameraType.PERSPECTIVE.value
    assert float(camera.fx) < 35.0  # the middle of the edge moves outward


def test_ns_render_sees_the_same_views(tmp_path):
    """It reads the dataset itself, after setup_train and setup_eval were disabled."""
    data = manager(make(tmp_path, masks=True, **DISTORTION), test_mode="test")
    for (camera, batch), (ours, data_of_ours) in zip(
        FixedIndicesEvalDataloader(data.eval_dataset), data.fixed_indices_eval_dataloader, strict=True
    ):
        assert camera.fx.equal(ours.fx) and camera.width.equal(ours.width)
        assert batch["image"].shape == (int(camera.height), int(camera.width), 3)
        assert batch["image"].mul(255).round().equal(data_of_ours["image"].float())
        assert batch["mask"].equal(data_of_ours["mask"])


def test_photos_are_opened_only_to_be_used(tmp_path):
    """Viewer, export and render work where the photos are gone; evaluation does not read training photos."""
    make(tmp_path)
    for frame in TRAIN_FRAMES:
        (tmp_path / f"images/{frame:03d}.png").unlink()
    assert len(manager(tmp_path, test_mode="test").fixed_indices_eval_dataloader) == 3
    for path in tmp_path.glob("images/*"):
        path.unlink()
    assert len(manager(tmp_path, test_mode="inference").train_dataset.cameras) == len(TRAIN_FRAMES)
    with pytest.raises(PhotoError, match=r"001\.png.*No such file"):
        manager(tmp_path)


def test_camera_res_scale_factor(tmp_path):
    data = manager(make(tmp_path, masks=True), camera_res_scale_factor=0.5)
    (view,) = data.next_round(0, downscale=1).views
    assert view.image.shape == (HEIGHT // 2, WIDTH // 2, 3)
    assert view.mask.shape == (HEIGHT // 2, WIDTH // 2)
    assert view.fx == 17.5


def test_alpha_color_and_mask_color_are_applied(tmp_path):
    data = manager(make(tmp_path, masks=True, channels=4))
    dataset = data.train_dataset
    dataset._dataparser_outputs.alpha_color = torch.tensor([1.0, 0.0, 0.0])
    dataset.mask_color = (0.0, 1.0, 0.0)
    image = dataset.photo(0).image
    source = torch.from_numpy(pixels(tmp_path, TRAIN_FRAMES[0]).copy()).float()
    source[:, : WIDTH // 3, :3] = torch.tensor([0.0, 255.0, 0.0])
    alpha = source[..., 3:] / 255
    expected = source[..., :3] * alpha + torch.tensor([255.0, 0.0, 0.0]) * (1 - alpha)
    assert (image - expected).abs().max() <= 0.501
    assert dataset.nbytes(0) == dataset.photo(0).nbytes


def test_nbytes_needs_headers_only(tmp_path):
    data = manager(make(tmp_path, masks=True, channels=4, **DISTORTION))
    for index in range(len(data.train_dataset)):
        assert data.train_dataset.nbytes(index) == data.train_dataset.photo(index).nbytes


def test_many_photos_need_no_pinned_memory(tmp_path):
    folder = make(tmp_path, frames=1)
    meta = json.loads((folder / "transforms.json").read_text())
    meta["frames"] *= 700
    (folder / "transforms.json").write_text(json.dumps(meta))
    data = manager(folder)
    assert len(data.train_dataset) > 500
    assert data.config.cache_images == "auto"
    assert not data.next_round(0, 1).views[0].image.is_pinned()


def error_of(kind, folder, **options):
    with pytest.raises(kind) as error:
        manager(folder, **options)
    return str(error.value)


def test_unfit_photos_are_found_before_training(tmp_path):
    folder = make(tmp_path)
    photo = folder / "images/003.png"
    for cache_gib in (None, 0.0):
        photo.write_bytes(b"nothing")
        assert f"Cannot read {photo}" in error_of(PhotoError, folder, image_cache_gib=cache_gib)
        Image.new("RGB", (WIDTH, HEIGHT + 1)).save(photo)
        message = error_of(PhotoError, folder, image_cache_gib=cache_gib)
        assert f"{photo} is 40x31 pixels, but its camera is 40x30" in message


def test_unfit_masks_are_named(tmp_path):
    folder = make(tmp_path, masks=True)
    mask = folder / "images/mask_005.png"
    Image.new("L", (WIDTH, HEIGHT)).save(mask)
    assert f"The mask {mask} keeps no pixel of {folder / 'images/005.png'}" in error_of(PhotoError, folder)
    Image.new("L", (WIDTH - 1, HEIGHT), 255).save(mask)
    assert f"{mask} is 39x30 pixels, but its camera is 40x30" in error_of(PhotoError, folder)


@pytest.mark.parametrize("model", ["EQUIRECTANGULAR", "ORTHOPHOTO", "VR180_L"])
def test_cameras_that_cannot_be_rendered_are_refused(tmp_path, model):
    message = error_of(LensError, make(tmp_path, camera_model=model))
    assert "001.png cannot be used" in message
    assert f"its model is {model}" in message


def test_fourth_radial_coefficient_is_refused(tmp_path):
    assert "k4 is 0.5" in error_of(LensError, make(tmp_path, k1=0.1, k4=0.5))


def test_empty_splits(tmp_path):
    names = [f"images/{i:03d}.png" for i in range(FRAMES)]
    folder = make(tmp_path, train_filenames=[], val_filenames=names, test_filenames=[])
    assert f"No training photos in {folder}" in error_of(ValueError, folder)
    meta = json.loads((folder / "transforms.json").read_text())
    meta.update(train_filenames=names, val_filenames=[])
    (folder / "transforms.json").write_text(json.dumps(meta))
    data = manager(folder)
    assert len(data.eval_dataset) == 0
    for use in (lambda: data.next_eval_image(0), lambda: data.fixed_indices_eval_dataloader):
        with pytest.raises(ValueError, match=r"No evaluation photos in .*split 'val'.*val_filenames"):
            use()


def test_options_that_cannot_be_honoured_are_refused(tmp_path):
    folder = make(tmp_path)
    assert "'fps'" in error_of(ValueError, folder, train_cameras_sampling_strategy="fps")
    assert "views_per_round is 0" in error_of(ValueError, folder, views_per_round=0)


def test_real_photos(test_data):
    data = manager(test_data / "fox_tiny", views_per_round=4)
    assert len(data.train_dataset) + len(data.eval_dataset) == 25
    shapes = {view.image.shape for position in range(0, 16, 4) for view in data.next_round(position, 1).views}
    assert shapes == {(320, 180, 3)}
    brightness = [float(batch["image"].float().mean()) for _, batch in data.fixed_indices_eval_dataloader]
    assert all(20 < mean < 235 for mean in brightness)
