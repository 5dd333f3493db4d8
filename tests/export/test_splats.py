"""Reading Gaussians from files of every kind."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from gaussians import random_gaussians, write_ply
from saved import checkpoint

from bytesplat_ns.splats import ply, spz
from bytesplat_ns.splats import read as splats
from bytesplat_ns.splats.read import SplatError


@pytest.mark.parametrize("layout", ["new", "old"])
@pytest.mark.parametrize("degree", [1, 3])
def test_a_checkpoint_of_splatfacto(tmp_path, layout, degree):
    gaussians = random_gaussians(30, degree)
    path = checkpoint(tmp_path / "run/nerfstudio_models/step-000029999.ckpt", gaussians, layout)
    with pytest.raises(Exception, match="numpy"):
        torch.load(path, weights_only=True)  # why a loader of our own is needed
    found = splats.read(path)
    assert found.source == "checkpoint of splatfacto" and found.sh_degree == degree
    assert found.run == tmp_path / "run"
    for name, values in gaussians.items():
        assert torch.equal(found.parameters[name], values)
    with pytest.raises(Exception, match="numpy"):
        torch.load(path, weights_only=True)  # others stay as careful as before


def test_splatfacto_without_harmonics_trains_logits_of_colours(tmp_path):
    gaussians = random_gaussians(30, 0)
    found = splats.read(checkpoint(tmp_path / "a.ckpt", gaussians))
    colors = found.parameters["features_dc"] * 0.28209479177387814 + 0.5
    torch.testing.assert_close(colors, gaussians["features_dc"].sigmoid())


def test_a_checkpoint_of_bytesplat(tmp_path):
    gaussians = random_gaussians(30, 0)
    found = splats.read(checkpoint(tmp_path / "a.ckpt", gaussians, bytesplat={"version": 1}))
    assert found.source == "checkpoint of bytesplat"
    assert torch.equal(found.parameters["features_dc"], gaussians["features_dc"])


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_a_ply_bit_by_bit(tmp_path, degree):
    gaussians = random_gaussians(10_000, degree)  # more than one block of rows
    write_ply(tmp_path / "a.ply", gaussians, comments=["frame: training"])
    found = splats.read(tmp_path / "a.ply")
    assert found.source == "PLY" and found.sh_degree == degree
    for name, values in gaussians.items():
        assert torch.equal(found.parameters[name], values)


def test_a_ply_in_red_green_and_blue(tmp_path):
    gaussians = random_gaussians(100, 2)
    write_ply(tmp_path / "a.ply", gaussians, rgb=True)
    found = splats.read(tmp_path / "a.ply")
    assert found.sh_degree == 0
    colors = (gaussians["features_dc"] * 0.28209479177387814 + 0.5).clamp(0, 1)
    read_back = found.parameters["features_dc"] * 0.28209479177387814 + 0.5
    assert (read_back - colors).abs().max() <= 1 / 255 + 1e-6, "eight bits, cut off as nerfstudio does"


def test_an_spz(tmp_path):
    spz.write(tmp_path / "a.spz", random_gaussians(100, 1), False)
    found = splats.read(tmp_path / "a.spz")
    assert found.source == "SPZ" and len(found) == 100 and found.sh_degree == 1


def test_numbers_that_are_none_make_a_gaussian_unusable():
    gaussians = random_gaussians(8, 1)
    gaussians["means"][1, 2] = float("nan")
    gaussians["features_rest"][3, 1, 1] = float("inf")
    gaussians["opacities"][4] = float("-inf")
    gaussians["quats"][6] = 0
    found = splats.Splats(gaussians, "test")
    assert found.usable().tolist() == [True, False, True, False, False, True, False, True]
    found.keep(found.usable())
    assert len(found) == 4 and torch.equal(found.parameters["scales"], gaussians["scales"][[0, 2, 5, 7]])


# Files that are something else ----------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = checkpoint(tmp_path / "a.ckpt", random_gaussians(3, 0), extra=Hostile())
    with pytest.raises(SplatError, match=r"a\.ckpt cannot be read as a checkpoint: it wants to run posix\.mkdir"):
        splats.read(path)
    assert not (tmp_path / "executed").exists()


def point_cloud(path):
    ply.write_vertices(path, 2, {name: np.zeros(2) for name in "xyz"})


def without_opacity(path):
    gaussians = random_gaussians(3, 0)
    write_ply(path, gaussians)
    path.write_bytes(path.read_bytes().replace(b"float opacity", b"float opaqueness"))


def compressed(path):
    path.write_bytes(b"ply\nformat binary_little_endian 1.0\nelement chunk 1\nproperty float min_x\nend_header\n")


def of_another_method(path):
    torch.save({"step": 1, "pipeline": {"_model.field.mlp.weight": torch.zeros(2)}}, path)


def of_unequal_lengths(path):
    checkpoint(path, {**random_gaussians(5, 1), "scales": torch.zeros(4, 3)})


@pytest.mark.parametrize(
    "name, make, message",
    [
        ("a.ply", None, "There is no file"),
        ("a.ply", lambda path: path.mkdir(), "is a folder"),
        ("a.obj", lambda path: path.touch(), r"ends in '\.obj'; Gaussians are read from"),
        ("a.ply", lambda path: path.touch(), "does not begin with 'ply'"),
        ("a.ply", point_cloud, r"a point cloud \(x, y, z\), no Gaussians.*ply_file_path"),
        ("a.ply", without_opacity, "lacks the property opacity"),
        ("a.ply", compressed, "is a compressed PLY, which is not read"),
        ("a.ply", lambda path: write_ply(path, random_gaussians(0, 1)), "it is empty"),
        ("a.spz", lambda path: path.write_bytes(b"NGSP"), "not an SPZ file"),
        ("a.ckpt", lambda path: path.write_text("{}"), "it is damaged, or was not written by torch.save"),
        ("a.ckpt", lambda path: torch.save([1], path), "no section 'pipeline'"),
        ("a.ckpt", of_another_method, r"holds no Gaussians \(no 'means'; found field\)"),
        ("a.ckpt", of_unequal_lengths, r"scales has shape \[4, 3\], expected \[5, 3\]"),
    ],
)
def test_files_without_gaussians(tmp_path, name, make, message):
    path = tmp_path / name
    if make is not None:
        make(path)
    with pytest.raises(SplatError, match=message) as error:
        splats.read(path)
    assert str(path) in str(error.value)
