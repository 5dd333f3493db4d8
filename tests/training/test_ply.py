"""PLY files: exact round trips, and errors that say what is wrong."""

import numpy as np
import pytest
import torch

from bytesplat_ns.splats.ply import PlyError, read_gaussians, read_vertices, write_vertices


def splat(n: int, degree: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    rest = 3 * ((degree + 1) ** 2 - 1)
    names = ["x", "y", "z", "f_dc_0", "f_dc_1", "f_dc_2", *[f"f_rest_{i}" for i in range(rest)], "opacity"]
    names += [f"scale_{i}" for i in range(3)] + [f"rot_{i}" for i in range(4)]
    return {name: rng.standard_normal(n).astype(np.float32) for name in names}


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_vertices_come_back_bit_by_bit(tmp_path, n):
    properties = splat(n, 1) | {"red": np.arange(n).astype(np.uint8)}
    write_vertices(tmp_path / "a.ply", n, properties)
    read = read_vertices(tmp_path / "a.ply")
    assert list(read) == list(properties)
    for name, values in properties.items():
        np.testing.assert_array_equal(read[name], values)


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_harmonics_are_stored_channel_by_channel(tmp_path, degree):
    properties = splat(5, degree)
    write_vertices(tmp_path / "a.ply", 5, properties)
    gaussians = read_gaussians(tmp_path / "a.ply")
    bases = (degree + 1) ** 2 - 1
    assert gaussians["features_rest"].shape == (5, bases, 3)
    for channel in range(3):
        for basis in range(bases):
            stored = torch.from_numpy(properties[f"f_rest_{channel * bases + basis}"])
            assert torch.equal(gaussians["features_rest"][:, basis, channel], stored)
    assert gaussians["opacities"].shape == (5, 1)


def test_a_column_of_another_length_is_refused(tmp_path):
    with pytest.raises(PlyError, match="property y has 2 values"):
        write_vertices(tmp_path / "a.ply", 3, {"x": np.zeros(3), "y": np.zeros(2)})


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: b"obj" + data, "does not begin"),
        (lambda data: data[:40], "ends within its header"),
        (lambda data: data[:-1], "holds 4 of the 5 vertices"),
        (lambda data: data.replace(b"binary_little_endian", b"ascii"), "format ascii"),
        (lambda data: data.replace(b"property float rot_3", b"property float other"), "lacks the property rot_3"),
        (lambda data: data.replace(b"property float x", b"property int16 x"), "type int16"),
        (lambda data: data.replace(b"element vertex", b"element corner"), "the first element is corner"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    path = tmp_path / "a.ply"
    write_vertices(path, 5, splat(5, 0))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PlyError, match=message):
        read_gaussians(path)
