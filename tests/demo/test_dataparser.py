"""Nerfstudio's own dataparser reads the demo's capture as it stands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bytesplat_ns.demo.capture import Capture, write_capture

CAPTURE = Capture(views=9, width=32, height=24, supersample=1, points=300, workers=1)


def test_the_default_dataparser_reads_the_capture(tmp_path):
    parsers = pytest.importorskip("nerfstudio.data.dataparsers.nerfstudio_dataparser")
    write_capture(tmp_path, CAPTURE)
    config = parsers.NerfstudioDataParserConfig(
        data=tmp_path, load_3D_points=True, eval_mode="interval", eval_interval=8
    )
    parser = config.setup()
    train = parser.get_dataparser_outputs("train")
    held_out = parser.get_dataparser_outputs("val")

    assert [path.name for path in held_out.image_filenames] == ["frame_00001.png", "frame_00009.png"]
    assert len(train.image_filenames) == 7
    assert train.metadata["points3D_xyz"].shape == (300, 3)
    assert train.metadata["points3D_rgb"].dtype == torch.uint8
    cameras = train.cameras
    assert (cameras.width == 32).all() and (cameras.height == 24).all()
    np.testing.assert_allclose(cameras.fx, CAPTURE.focal, rtol=1e-6)

    # Scaled into the unit cube with z up: the cameras look down on the cloud, and see most of it.
    poses = cameras.camera_to_worlds
    assert poses[:, :, 3].abs().max() <= 1.001
    points = train.metadata["points3D_xyz"]
    local = torch.einsum("vji,vnj->vni", poses[:, :, :3], points - poses[:, None, :, 3])
    ahead = -local[..., 2]
    inside = (local[..., 0].abs() / ahead < 16 / CAPTURE.focal) & (local[..., 1].abs() / ahead < 12 / CAPTURE.focal)
    assert ((ahead > 0) & inside).float().mean() > 0.4
    assert poses[:, 2, 3].min() > points[:, 2].median()
