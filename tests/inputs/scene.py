"""Small data sets, made on the spot in each of the formats: a few cameras around some points, photos of noise."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.spatial.transform import Rotation

Numbers = np.ndarray
Format = tuple[str, ...]
"""The last words of ``ns-train``: the data's format and its options."""

HALF = ("--eval-mode", "interval", "--eval-interval", "2")
"""Every other photo is held out."""


def poses(count: int, radius: float = 2.0) -> Numbers:
    """[count, 4, 4] OpenGL cameras to world on an arc, all looking at the origin, z up."""
    result = np.tile(np.eye(4), (count, 1, 1))
    for pose, angle in zip(result, np.linspace(0.0, 2.0, count), strict=True):
        back = np.array([np.cos(angle), np.sin(angle), 0.5]) / np.sqrt(1.25)
        right = np.array([-np.sin(angle), np.cos(angle), 0.0])
        pose[:3, :3] = np.stack([right, np.cross(back, right), back], axis=1)
        pose[:3, 3] = radius * back
    return result


def noise(number: int, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A photo with a coarse random pattern, of a Pillow mode."""
    generator = np.random.default_rng(number)
    coarse = generator.integers(0, 256, (4, 4, 4), dtype=np.uint8)
    rgba = Image.fromarray(coarse, "RGBA").resize((width, height), Image.Resampling.BILINEAR)
    if mode == "RGBA":
        return rgba
    if mode == "LA":
        return rgba.convert("LA")
    if mode == "I;16":
        return Image.fromarray(np.asarray(rgba.convert("L")).astype(np.uint16) * 257)
    return rgba.convert("RGB").convert(mode)


def cloud(count: int = 60) -> Numbers:
    """[count, 3] points around the origin."""
    return np.random.default_rng(7).normal(scale=0.4, size=(count, 3))


def write_ply(file: Path, points: Numbers, colours: bool = True) -> None:
    """A binary PLY with positions in float64 and, if wanted, a colour for each point."""
    kinds = [(axis, "<f8") for axis in "xyz"] + [(c, "u1") for c in ("red", "green", "blue") if colours]
    rows = np.zeros(len(points), dtype=kinds)
    for axis, name in enumerate("xyz"):
        rows[name] = points[:, axis]
    if colours:
        rows["red"] = 200
    lines = [f"property {'double' if kind == '<f8' else 'uchar'} {name}" for name, kind in kinds]
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(points)}", *lines, "end_header", ""]
    file.write_bytes("\n".join(header).encode() + rows.tobytes())


@dataclass
class Scene:
    """What is written; tests change it before, or the files after."""

    folder: Path
    count: int = 6
    width: int = 48
    height: int = 36
    focal: float = 40.0
    points: Numbers | None = field(default_factory=cloud)  # [P, 3]
    colours: bool = True
    extension: str = "png"
    name: Callable[[int], str] = "photo_{:02d}".format
    mode: str = "RGB"
    offset: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of the whole world
    poses: Numbers | None = None  # [count, 4, 4]

    def __post_init__(self) -> None:
        if self.poses is None:
            self.poses = poses(self.count)
        self.poses = self.poses.copy()
        self.poses[:, :3, 3] += self.offset
        if self.points is not None:
            self.points = self.points + self.offset

    def photo(self, number: int) -> Path:
        return self.folder / "images" / f"{self.name(number)}.{self.extension}"

    def write_photos(self) -> None:
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        for number in range(self.count):
            noise(number, self.width, self.height, self.mode).save(self.photo(number))

    def camera(self) -> dict[str, Any]:
        size = {"w": self.width, "h": self.height, "cx": self.width / 2, "cy": self.height / 2}
        return {"fl_x": self.focal, "fl_y": self.focal, **size}

    def frames(self) -> list[dict[str, Any]]:
        assert self.poses is not None
        return [
            {"file_path": f"images/{self.photo(number).name}", "transform_matrix": pose.tolist()}
            for number, pose in enumerate(self.poses)
        ]

    # Formats --------------------------------------------------------------------------------------------------------

    def nerfstudio(self, *options: str, **meta: Any) -> Format:
        """Writes the scene for ``nerfstudio-data``; ``meta`` is added to transforms.json, None removes a key."""
        self.write_photos()
        content = {**self.camera(), "frames": self.frames()}
        if self.points is not None:
            write_ply(self.folder / "cloud.ply", self.points, self.colours)
            content["ply_file_path"] = "cloud.ply"
        content = {key: value for key, value in {**content, **meta}.items() if value is not None}
        (self.folder / "transforms.json").write_text(json.dumps(content), "utf-8")
        return "nerfstudio-data", *(options or HALF)

    def change(self, edit: Callable[[dict[str, Any]], Any]) -> None:
        """Edits transforms.json in place."""
        file = self.folder / "transforms.json"
        content = json.loads(file.read_text("utf-8"))
        edit(content)
        file.write_text(json.dumps(content), "utf-8")

    def instant_ngp(self, **meta: Any) -> Format:
        self.write_photos()
        content = {**self.camera(), "frames": self.frames(), **meta}
        (self.folder / "transforms.json").write_text(json.dumps(content), "utf-8")
        return "instant-ngp-data", *HALF

    def blender(self, *options: str) -> Format:
        """Three splits of the same photos."""
        self.write_photos()
        angle = 2 * np.arctan(self.width / 2 / self.focal)
        frames = self.frames()
        for frame in frames:
            frame["file_path"] = f"./{frame['file_path'].removesuffix('.png')}"
        for split, chosen in {"train": frames[1:], "val": frames[:1], "test": frames[:1]}.items():
            content = {"camera_angle_x": angle, "frames": chosen}
            (self.folder / f"transforms_{split}.json").write_text(json.dumps(content))
        if self.points is not None:
            write_ply(self.folder / "cloud.ply", self.points, self.colours)
        return "blender-data", *options

    def colmap(self, *options: str, model: str = "PINHOLE", parameters: tuple[float, ...] = (), at: str = "") -> Format:
        """A binary COLMAP model; ``parameters`` come after focal lengths and principal point."""
        self.write_photos()
        folder = self.folder / (at or "colmap/sparse/0")
        folder.mkdir(parents=True)
        number = {"PINHOLE": 1, "OPENCV": 4, "OPENCV_FISHEYE": 5, "FULL_OPENCV": 6}[model]
        values = self.focal, self.focal, self.width / 2, self.height / 2, *parameters
        camera = struct.pack(f"<Qiiqq{len(values)}d", 1, 1, number, self.width, self.height, *values)
        (folder / "cameras.bin").write_bytes(camera)
        images = struct.pack("<Q", self.count)
        assert self.poses is not None
        for index, pose in enumerate(self.poses):
            rotation = (pose[:3, :3] * [1, -1, -1]).T
            x, y, z, w = Rotation.from_matrix(rotation).as_quat()
            numbers = w, x, y, z, *(-rotation @ pose[:3, 3])
            images += struct.pack("<i7di", index + 1, *numbers, 1) + self.photo(index).name.encode() + b"\0"
            images += struct.pack("<Q", 2) + 2 * struct.pack("<ddq", 1.0, 2.0, -1)
        (folder / "images.bin").write_bytes(images)
        rows = b"".join(
            struct.pack("<Qddd3BdQ", index + 1, *point, 200, 100, 50, 0.5, 0)
            for index, point in enumerate([] if self.points is None else self.points)
        )
        (folder / "points3D.bin").write_bytes(struct.pack("<Q", len(rows) // 51) + rows)
        return "colmap", *(options or HALF)
