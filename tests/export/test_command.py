"""``bytesplat-export`` on runs that nerfstudio could have left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gaussians import random_gaussians
from saved import checkpoint, run
from scipy.spatial.transform import Rotation

from bytesplat_ns.export.command import main, within_box
from bytesplat_ns.splats import read as splats
from bytesplat_ns.splats import spz
from bytesplat_ns.splats.frames import Similarity

TURN = Rotation.from_euler("xyz", [0.4, -1.1, 2.0]).as_matrix()
TRANSFORM, SCALE = np.c_[TURN, [1.0, 2.0, 3.0]], 0.25


def visible(n: int, degree: int) -> dict[str, torch.Tensor]:
    """Random Gaussians of which none is too faint to be exported."""
    gaussians = random_gaussians(n, degree)
    gaussians["opacities"].clamp_(-5)
    return gaussians


def export(config: Path, output: Path, *options: str) -> dict[str, torch.Tensor]:
    main(["--load-config", str(config), "--output", str(output), *options])
    return splats.read(output).parameters


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_ply_in_the_training_frame(tmp_path, capsys, degree):
    gaussians = visible(200, degree)
    found = export(run(tmp_path / "run", gaussians), tmp_path / "new/folder/splat.ply")
    if degree == 0:  # splatfacto's checkpoint holds logits of colours then
        gaussians["features_dc"] = (gaussians["features_dc"].sigmoid() - 0.5) / 0.28209479177387814
    for name, values in gaussians.items():
        assert torch.equal(found[name], values)
    printed = capsys.readouterr().out
    assert f"splat.ply: 200 of 200 Gaussians, SH degree {degree}, training frame, 0." in printed
    assert "Left out" not in printed


def test_ply_in_the_original_frame(tmp_path):
    gaussians = visible(200, 3)
    config = run(tmp_path / "run", gaussians, TRANSFORM, SCALE)
    found = export(config, tmp_path / "a.ply", "--frame", "original")
    assert b"comment frame: original" in (tmp_path / "a.ply").read_bytes()[:300]
    # x_training = scale (R x + t): undone by hand for what is easily undone.
    means = (gaussians["means"].double().numpy() / SCALE - TRANSFORM[:, 3]) @ TURN
    np.testing.assert_allclose(found["means"], means, atol=1e-5)
    torch.testing.assert_close(found["scales"], gaussians["scales"] - np.log(SCALE), rtol=0, atol=1e-5)
    expected = Similarity.from_dataparser(TRANSFORM, SCALE, "").inverse().apply(gaussians)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values)


def test_spz(tmp_path):
    gaussians = visible(200, 2)
    config = run(tmp_path / "run", gaussians, mode="antialiased")
    found = export(config, tmp_path / "a.spz")
    torch.testing.assert_close(found["means"], gaussians["means"], rtol=0, atol=2.0**-20)
    assert spz.read(tmp_path / "a.spz")[1], "it is known that these are to be drawn antialiased"
    main(["--load-config", str(run(tmp_path / "classic", gaussians)), "--output", str(tmp_path / "b.spz")])
    assert not spz.read(tmp_path / "b.spz")[1]
    same = export(config, tmp_path / "c.spz", "--spz-version", "4")
    assert (tmp_path / "c.spz").read_bytes()[:5] == b"NGSP\4"
    assert all(torch.equal(same[name], values) for name, values in found.items())


def shard(config: Path, count: int) -> None:
    """Makes a run's checkpoint one of shards, between which its Gaussians are spread."""
    path = next((config.parent / "nerfstudio_models").glob("step-*.ckpt"))
    state = torch.load(path, weights_only=False)
    prefix = "_model.gauss_params."
    tables = {name.removeprefix(prefix): table for name, table in state["pipeline"].items() if prefix in name}
    tables["ids"] = torch.arange(len(tables["means"]))
    names = [f"shard-000000000.{path.stem}.abcdef01.rank-{rank:04d}.pt" for rank in range(count)]
    parts = [{name: table[rank::count].clone() for name, table in tables.items()} for rank in range(count)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, path.with_name(name))
    shards = {name: len(part["ids"]) for name, part in zip(names, parts, strict=True)}
    torch.save({"step": 29_999, "pipeline": {}, "bytesplat": {"version": 1, "shards": shards, "gaussians": {}}}, path)


def test_shards_are_merged_block_by_block(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bytesplat_ns.parallel.checkpoint.BLOCK", 64)
    gaussians = visible(300, 2)
    gaussians["means"][3, 0] = float("nan")
    whole, shards = (run(tmp_path / name, gaussians, TRANSFORM, SCALE) for name in ("whole", "shards"))
    shard(shards, 3)
    for name, options in {"a.ply": [], "b.ply": ["--frame", "original"], "c.spz": []}.items():
        for config in (whole, shards):
            export(config, config.parent / name, *options)
        assert (shards.parent / name).read_bytes() == (whole.parent / name).read_bytes()
    assert "299 of 300 Gaussians" in capsys.readouterr().out
    next((shards.parent / "nerfstudio_models").glob("shard-*rank-0001.pt")).unlink()
    with pytest.raises(SystemExit, match=r"rank-0001\.pt is missing"):
        export(shards, tmp_path / "d.ply")


def test_left_out_one_by_one_with_one_line(tmp_path, capsys):
    gaussians = visible(100, 1)
    gaussians["means"][3, 0] = float("nan")  # nerfstudio's exporter drops all Gaussians for this one
    gaussians["features_rest"][5, 2, 1] = float("inf")
    gaussians["opacities"][[7, 8, 9]] = -6.0
    found = export(run(tmp_path / "run", gaussians), tmp_path / "a.ply")
    kept = [i for i in range(100) if i not in (3, 5, 7, 8, 9)]
    assert torch.equal(found["quats"], gaussians["quats"][kept])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("Left out: 2 with NaN or infinite values, 3 fainter than 1/255.")


def test_crop_box(tmp_path, capsys):
    gaussians = visible(300, 0)
    config = run(tmp_path / "run", gaussians, TRANSFORM, SCALE)
    box = ["--obb-center", "0.1", "0", "-0.2", "--obb-rotation", "0.3", "0.5", "-1", "--obb-scale", "0.8", "0.7", "2"]
    found = export(config, tmp_path / "a.ply", *box)
    inside = within_box(gaussians["means"], (0.1, 0.0, -0.2), (0.3, 0.5, -1.0), (0.8, 0.7, 2.0))
    assert 20 < inside.sum() < 280
    assert torch.equal(found["means"], gaussians["means"][inside])
    assert f"Left out: {300 - int(inside.sum())} outside the box." in capsys.readouterr().out
    moved = export(config, tmp_path / "b.ply", *box, "--frame", "original")
    assert len(moved["means"]) == inside.sum(), "the box is in the training frame, whatever the result's"


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_the_box_is_the_viewers():
    """Turned by roll, then pitch, then yaw about fixed axes, as nerfstudio's OrientedBox."""
    from nerfstudio.data.scene_box import OrientedBox

    points = torch.randn(1_000, 3)
    center, rotation, sides = (0.2, -0.1, 0.3), (0.4, -0.7, 1.9), (1.0, 2.0, 0.7)
    theirs = OrientedBox.from_params(center, rotation, sides).within(points)
    assert torch.equal(within_box(points, center, rotation, sides), theirs) and 50 < theirs.sum() < 950


def test_colours_without_harmonics(tmp_path):
    config = run(tmp_path / "run", visible(50, 3))
    export(config, tmp_path / "a.ply", "--ply-color-mode", "rgb")
    header = (tmp_path / "a.ply").read_bytes().split(b"end_header")[0]
    assert b"property uchar red" in header and b"f_dc" not in header and b"f_rest" not in header


def test_the_latest_checkpoint_or_another(tmp_path):
    first, last = visible(10, 1), visible(12, 1)
    config = run(tmp_path / "run", last, step=2_000)
    checkpoint(tmp_path / "run/nerfstudio_models/step-000001000.ckpt", first)
    assert len(export(config, tmp_path / "a.ply")["means"]) == 12
    assert len(export(config, tmp_path / "a.ply", "--load-step", "1000")["means"]) == 10


def test_no_import_of_nerfstudio():
    """It would take many times longer than the export."""

    code = "import sys, bytesplat_ns.export.command; sys.exit('nerfstudio' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "name, far, warned", [("a.ply", 4e6, True), ("a.ply", 1e3, False), ("a.spz", 4e5, True), ("a.spz", 1e3, False)]
)
def test_a_warning_where_numbers_are_too_coarse(tmp_path, capsys, name, far, warned):
    config = run(tmp_path / "run", visible(20, 1), np.c_[np.eye(3), [-far, 0, 0]], 1.0)
    export(config, tmp_path / name, "--frame", "original")
    assert ("WARNING: coordinates up to" in capsys.readouterr().out) == warned


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (["--output", "a.sog"], r"a\.sog: the ending must be \.ply or \.spz"),
        (["--output", "a.compressed.ply"], r"the ending must be \.ply or \.spz"),
        (["--output", "a.spz", "--ply-color-mode", "rgb"], "rgb is for .ply"),
        (["--output", "a.ply", "--spz-version", "4"], "--spz-version is for .spz"),
        (["--output", "a.ply", "--obb-center", "0", "0", "0"], "both --obb-center and --obb-scale"),
        (["--output", "a.ply", "--obb-center", "9", "0", "0", "--obb-scale", "1", "1", "1"], "nothing is left"),
        (["--output", "a.ply", "--load-step", "7"], "holds steps 29999"),
        (["--output", "a.ply", "--frame", "original"], "There is no .*dataparser_transforms.json"),
        (["--output", "a.ply", "--load-config", "run"], "is a folder; name the config.yml in it"),
        (["--output", "a.ply", "--load-config", "none.yml"], "there is no such file"),
        (["--output", "a.ply", "--load-config", "run/nerfstudio_models/step-000029999.ckpt"], "not the config.yml"),
        (["--output", "a.ply", "--load-config", "moved/config.yml"], "checkpoints must lie beside"),
    ],
)
def test_errors_say_what_to_do(tmp_path, monkeypatch, capsys, options, message):

    monkeypatch.chdir(tmp_path)
    run(Path("run"), visible(10, 1))
    Path("moved").mkdir()
    Path("moved/config.yml").write_text(Path("run/config.yml").read_text())
    if "--load-config" not in options:
        options = ["--load-config", "run/config.yml", *options]
    with pytest.raises(SystemExit) as error:
        main(options)
    assert error.value.code not in (0, None)
    said = f"{error.value.code} {capsys.readouterr().err}".replace("│", " ")
    assert re.search(message, " ".join(said.split())), said
    assert not Path("a.ply").exists()


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    config, output = run(tmp_path / "run", visible(10, 1)), tmp_path / "a.ply"
    before = export(config, output)

    def fill(path, *_, **__):
        Path(path).write_bytes(b"ply")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bytesplat_ns.export.command.ply.write_gaussian_blocks", fill)
    with pytest.raises(SystemExit, match=r"a\.ply could not be written: .*No space left.*Free some space"):
        export(config, output)
    assert torch.equal(splats.read(output).parameters["means"], before["means"])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.ply"]


def test_a_place_that_cannot_be(tmp_path):
    config = run(tmp_path / "run", visible(10, 1))
    with pytest.raises(SystemExit, match=r"config\.yml/a\.ply could not be written"):
        export(config, config / "a.ply")
