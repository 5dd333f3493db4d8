"""SPZ files: those of another program, and our own."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from gaussians import random_gaussians
from torch.nn.functional import normalize

from bytesplat_ns.splats import ply, spz, spz_container
from bytesplat_ns.splats.spz_container import SpzError

HEADER = 16
TABLE = 32  # where the table of our files of version 4 begins


def attributes(path: Path) -> bytes:
    """The attributes of a file of version 3 or 4 without extensions, one after the other."""
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        return gzip.decompress(content)[HEADER:]
    start, parts = TABLE + 16 * content[15], []
    for packed, unpacked in struct.iter_unpack("<QQ", content[TABLE:start]):
        parts.append(zstandard.ZstdDecompressor().decompress(content[start : start + packed]))
        assert len(parts[-1]) == unpacked
        start += packed
    assert start == len(content)
    return b"".join(parts)


def assert_close(found, original, position: float, harmonic: float = 1 / 16) -> None:
    """Equal up to the quantisation of version 3, within the range of each attribute."""

    def error(a, b, limit):
        return bool(((a - b).abs() <= limit * (1 + 1e-4) + 1e-6).all())

    assert found["means"].shape == original["means"].shape
    assert error(found["means"], original["means"], position)
    # Bytes, rounded: half a step.
    assert error(
        found["opacities"].sigmoid(), original["opacities"].sigmoid().clamp(0.25 / 255, 254.75 / 255), 0.5 / 255
    )
    assert error(found["scales"], original["scales"].clamp(-10, 255 / 16 - 10), 0.5 / 16)
    reach = 0.5 / 0.15
    assert error(found["features_dc"], original["features_dc"].clamp(-reach, reach), 0.5 / 255 / 0.15)
    # Four or five bits; the last bucket ends at 127/128.
    assert error(found["features_rest"], original["features_rest"].clamp(-1, 127 / 128), harmonic + 0.5 / 128)
    # Three components to 1/1022 of a half turn's root, the fourth follows: an angle below 0.005.
    dot = (normalize(found["quats"], dim=1) * normalize(original["quats"], dim=1)).sum(dim=1).abs()
    assert dot.min() > np.cos(0.005 / 2)


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_round_trip(tmp_path, degree, version):
    gaussians = random_gaussians(20_000, degree)
    spz.write(tmp_path / "a.spz", gaussians, antialiased=degree == 2, version=version)
    found, antialiased = spz.read(tmp_path / "a.spz")
    assert antialiased == (degree == 2)
    assert found["features_rest"].shape == (20_000, (degree + 1) ** 2 - 1, 3)
    assert_close(found, gaussians, position=2.0**-20)
    assert all(values.isfinite().all() for values in found.values())


@pytest.mark.parametrize("farthest, step", [(7.9, 2.0**-20), (100.0, 2.0**-16), (5e6, 1.0)])
def test_positions_are_as_fine_as_the_farthest_allows(tmp_path, farthest, step):
    gaussians = random_gaussians(100, 0)
    gaussians["means"][7, 1] = -farthest
    spz.write(tmp_path / "a.spz", gaussians, False)
    error = (spz.read(tmp_path / "a.spz")[0]["means"] - gaussians["means"]).abs().max()
    assert step / 8 < error <= step / 2


def test_coordinates_out_of_range_are_refused(tmp_path):
    gaussians = random_gaussians(10, 0)
    gaussians["means"][0, 0] = 1e7
    with pytest.raises(SpzError, match=r"A Gaussian lies 1e\+07 from the origin"):
        spz.write(tmp_path / "a.spz", gaussians, False)


def test_extreme_values_stay_within_their_bytes(tmp_path):
    gaussians = random_gaussians(4, 3)
    for name in ("opacities", "scales", "features_dc", "features_rest"):
        gaussians[name][0], gaussians[name][1] = 1e4, -1e4
    gaussians["quats"][2] = torch.tensor([1e-20, 0, 0, 0])
    spz.write(tmp_path / "a.spz", gaussians, False)
    found, _ = spz.read(tmp_path / "a.spz")
    assert all(values.isfinite().all() for values in found.values())
    assert found["opacities"][0] > 6 and found["opacities"][1] < -6


def test_threads_write_one_gzip_member(tmp_path, monkeypatch):
    """Readers stop at the end of the first member; several blocks must not show."""
    gaussians = random_gaussians(5_000, 3)
    spz.write(tmp_path / "a.spz", gaussians, False)
    monkeypatch.setattr(spz_container, "_BLOCK", 10_000)
    spz.write(tmp_path / "b.spz", gaussians, False)
    for name in "ab":
        unpacker = zlib.decompressobj(wbits=31)
        content = unpacker.decompress((tmp_path / f"{name}.spz").read_bytes())
        assert unpacker.eof and not unpacker.unused_data
        assert len(content) == HEADER + 5_000 * (9 + 1 + 3 + 3 + 4 + 45)
    assert gzip.decompress((tmp_path / "a.spz").read_bytes()) == gzip.decompress((tmp_path / "b.spz").read_bytes())
    assert (tmp_path / "b.spz").stat().st_size < 1.05 * (tmp_path / "a.spz").stat().st_size


def test_version_4_holds_what_version_3_holds(tmp_path, monkeypatch):
    """Whatever the number of threads, and in frames that state their size."""
    gaussians = random_gaussians(60_000, 3)
    spz.write(tmp_path / "3.spz", gaussians, True)
    files = []
    for threads in (1, 3):
        monkeypatch.setattr(spz_container, "_THREADS", threads)
        spz.write(tmp_path / "4.spz", gaussians, True, version=4)
        files.append((tmp_path / "4.spz").read_bytes())
    assert files[0] == files[1]
    assert attributes(tmp_path / "3.spz") == attributes(tmp_path / "4.spz")
    head = gzip.decompress((tmp_path / "3.spz").read_bytes())[:15]
    assert files[0][:TABLE] == head[:4] + b"\4" + head[5:] + b"\6" + bytes([TABLE]) + bytes(15)


@pytest.mark.parametrize("version", [3, 4])
def test_no_gaussians(tmp_path, version):
    spz.write(tmp_path / "a.spz", random_gaussians(0, 3), False, version)
    assert len(spz.read(tmp_path / "a.spz")[0]["means"]) == 0


# Files of another program --------------------------------------------------------------------------------------------


@pytest.fixture
def splats(test_data: Path) -> Path:
    folder = test_data / "splats"
    if not folder.is_dir():
        pytest.skip(f"no splats of another program in {test_data}")
    return folder


@pytest.mark.parametrize("version", [3, 4])
def test_their_spz_is_their_ply(splats, version):
    found, antialiased = spz.read(splats / f"ref_converted/playbot_6_0.v{version}.spz")
    original = ply.read_gaussians(splats / "ref_converted/playbot_6_0.ply")
    assert not antialiased and len(found["means"]) == 1873
    assert_close(found, original, position=0.5 / 4096)


@pytest.mark.parametrize("version", [3, 4])
def test_we_write_the_bytes_that_they_write(splats, tmp_path, monkeypatch, version):
    """Unpacked, and with the 12 fractional bits that they give to positions."""
    monkeypatch.setattr(spz, "fractional_bits", lambda means: 12)
    theirs, ours = splats / f"ref_converted/playbot_6_0.v{version}.spz", tmp_path / "a.spz"
    spz.write(ours, ply.read_gaussians(splats / "ref_converted/playbot_6_0.ply"), False, version)
    assert attributes(ours) == attributes(theirs)
    if version == 3:
        heads = [gzip.decompress(path.read_bytes())[:HEADER] for path in (ours, theirs)]
    else:
        heads = [path.read_bytes()[:TABLE] for path in (ours, theirs)]
    assert heads[0] == heads[1]


@pytest.mark.parametrize("name, z", [("minimal-v2", 1), ("minimal-raw", 1), ("minimal-v3", -1), ("minimal-v4", -1)])
def test_their_fixtures(splats, name, z):
    """Four Gaussians at the corners of a square, drawn upright (w = 1) in the axes of the file."""
    found, _ = spz.read(splats / f"{name}.spz")
    assert sorted(map(tuple, found["means"].round().int().tolist())) == sorted(
        [(-1, 0, z), (0, 0, z), (-1, 0, 0), (0, 0, 0)]
    )
    torch.testing.assert_close(found["quats"].abs(), torch.tensor([[1.0, 0, 0, 0]]).expand(4, 4), rtol=0, atol=0.01)
    torch.testing.assert_close(found["opacities"].sigmoid(), torch.full((4, 1), 230 / 255))


# Extensions -----------------------------------------------------------------------------------------------------------

ORBIT = struct.pack("<IIfff", 0xADBE0002, 12, -0.5, 1.0, 2.0)  # how far a viewer may go: of no matter here


def extended(path: Path, version: int, *records: bytes) -> None:
    """Writes ten Gaussians with extensions."""
    spz.write(path, random_gaussians(10, 1), False, version)
    content, extensions = bytearray(path.read_bytes()), b"".join(records)
    if version == 4:
        content[TABLE:TABLE] = extensions
        content[16:20] = struct.pack("<I", TABLE + len(extensions))
    else:
        content = bytearray(gzip.decompress(content)) + extensions
    content[14] |= 2
    path.write_bytes(content if version == 4 else gzip.compress(content))


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("axes", [0, 4])
def test_extensions_are_skipped(tmp_path, version, axes):
    spz.write(tmp_path / "plain.spz", random_gaussians(10, 1), False)
    extended(tmp_path / "a.spz", version, ORBIT, struct.pack("<III", 0xADBE0003, 4, axes))
    found, plain = spz.read(tmp_path / "a.spz")[0], spz.read(tmp_path / "plain.spz")[0]
    assert all(torch.equal(found[name], values) for name, values in plain.items())


@pytest.mark.parametrize("version", [3, 4])
def test_other_axes_are_refused(tmp_path, version):
    extended(tmp_path / "a.spz", version, ORBIT, struct.pack("<III", 0xADBE0003, 4, 6))
    with pytest.raises(SpzError, match=r"axes of its own \(extension 0xadbe0003, value 6\)"):
        spz.read(tmp_path / "a.spz")


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: gzip.compress(data)[:-20], "is damaged"),
        (lambda data: gzip.compress(data[:-1]), "is cut short"),
        (lambda data: data[:10], "not an SPZ file"),
        (lambda data: b"ply" + data, "not an SPZ file"),
        (lambda data: data[:12] + b"\x04" + data[13:], "degree 4"),
        (lambda data: data[:4] + b"\x01" + data[5:], "version 1; versions 2, 3 and 4 are read"),
        (lambda data: data[:4] + b"\x05" + data[5:], "version 5"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    path = tmp_path / "a.spz"
    spz.write(path, random_gaussians(10, 2), False)
    path.write_bytes(damage(gzip.decompress(path.read_bytes())))
    with pytest.raises(SpzError, match=message) as error:
        spz.read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: data[:20], "cut short: 20 bytes of at least 32"),
        (lambda data: data[:100], "cut short: 100 bytes of at least 128"),
        (lambda data: data[:-1], "is cut short"),
        (lambda data: data[:8] + b"\x0b" + data[9:], r"damaged: attribute 0 has 90 bytes, 99 are expected"),
        (lambda data: data[:15] + b"\5" + data[16:], "a table of 5 attributes at byte 32"),
        (lambda data: data[:16] + b"\7" + data[17:], "a table of 6 attributes at byte 7"),
        (lambda data: data[:40] + b"\x5b" + data[41:], "attribute 0 has 91 bytes, 90 are expected"),
        (lambda data: data[:128] + b"oops" + data[132:], "is damaged: .*content size"),
        (lambda data: data[:133] + b"\x5b" + data[134:], "attribute 0 has 91 bytes, 90 are expected"),
        (lambda data: data[:134] + bytes(20) + data[154:], "is damaged"),
    ],
)
def test_damaged_files_of_version_4_are_refused(tmp_path, damage, message):
    path = tmp_path / "a.spz"
    spz.write(path, random_gaussians(10, 2), False, version=4)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SpzError, match=message) as error:
        spz.read(path)
    assert str(path) in str(error.value)
