"""What a data set's own files say about its cameras and points, in float64 and before a data parser reads them.

nerfstudio's parsers turn poses into float32 at once and trust what they read: poses that are not finite or not rigid
go through them unnoticed, and a missing key or file ends in an exception that names neither the file nor the frame.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from nerfstudio.cameras.cameras import CAMERA_MODEL_TO_TYPE
from nerfstudio.data.dataparsers.base_dataparser import DataParserConfig
from nerfstudio.data.dataparsers.blender_dataparser import BlenderDataParserConfig
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.instant_ngp_dataparser import InstantNGPDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.data.utils.colmap_parsing_utils import qvec2rotmat


class DataError(ValueError):
    """A data set cannot be used; the message names the file, what was found and what to do."""


@dataclass(frozen=True)
class Source:
    """The cameras of a data set as its files have them."""

    file: Path  # that holds the poses
    photos: list[Path]  # [N], before any downscaling
    poses: np.ndarray  # [N, 4, 4] float64 camera to world, OpenGL axes; the file's own world and unit
    applied: np.ndarray  # [4, 4] float64: what brought an original world to the file's
    applied_scale: float = 1.0  # likewise
    focal_y: float | None = None  # pixels, where nerfstudio's parser does not read it
    point_cloud: Path | None = None  # that a run would start from


def read(config: DataParserConfig) -> Source | None:
    """Reads the files that a parser of this configuration will read; None for parsers not known here.

    Raises:
        DataError: a file is missing, cannot be read, or lacks what the parser needs.
    """
    if isinstance(config, NerfstudioDataParserConfig):
        return _nerfstudio(config)
    if isinstance(config, InstantNGPDataParserConfig):
        return _instant_ngp(config)
    if isinstance(config, BlenderDataParserConfig):
        return _blender(config)
    if isinstance(config, ColmapDataParserConfig):
        return _colmap(config)
    return None


# transforms.json ----------------------------------------------------------------------------------------------------


def _transforms(file: Path) -> dict[str, Any]:
    """A JSON file with frames."""
    if not file.parent.is_dir():
        raise DataError(f"The data folder {file.parent} does not exist. Correct --data.")
    if not file.is_file():
        others = ", ".join(sorted(p.name for p in file.parent.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{file} does not exist (found {others}). Correct --data, or name the data's format at the end of the "
            f"command: nerfstudio-data, colmap, blender-data, instant-ngp-data."
        )
    try:
        meta = json.loads(file.read_text("utf-8"))
    except ValueError as error:  # of the encoding or of the JSON
        raise DataError(f"Cannot read {file}: {error}. Write the file again as JSON in UTF-8, without BOM.") from error
    frames = meta.get("frames") if isinstance(meta, dict) else None
    if not isinstance(frames, list) or not frames:
        found = "an empty list" if frames == [] else "none"
        raise DataError(f"{file} needs a list of 'frames', found {found}. Write one entry for each photo.")
    return meta


def _frame_poses(file: Path, frames: list[dict[str, Any]]) -> np.ndarray:
    """[N, 4, 4] poses of frames, each of which must have a path and a matrix."""
    poses = []
    for number, frame in enumerate(frames):
        if not isinstance(frame, dict):
            raise DataError(f"{file}: frame {number} is not an object with a path and a matrix. Correct or remove it.")
        for key in ("file_path", "transform_matrix"):
            if key not in frame:
                name = f"frame {number} ({frame.get('file_path', 'without a path')})"
                raise DataError(f"{file}: {name} has no '{key}'. Add it, or remove the frame.")
        if not isinstance(frame["file_path"], str):
            raise DataError(f"{file}: file_path of frame {number} is {frame['file_path']}. Write a path in quotes.")
        try:
            pose = np.array(frame["transform_matrix"], dtype=np.float64)
        except (TypeError, ValueError):
            pose = np.empty(0)
        if pose.shape != (4, 4):
            raise DataError(
                f"{file}: transform_matrix of {frame['file_path']} is not 4 x 4 numbers "
                f"(found shape {list(pose.shape)}). Correct it, or remove the frame."
            )
        poses.append(pose)
    return np.stack(poses)


def _nerfstudio(config: NerfstudioDataParserConfig) -> Source:
    explicit = config.data.suffix == ".json"
    file = config.data if explicit else config.data / "transforms.json"
    meta = _transforms(file)
    frames, folder = meta["frames"], file.parent
    poses = _frame_poses(file, frames)
    for key in ("fl_x", "fl_y", "cx", "cy", "w", "h"):
        lacking = [] if key in meta else [frame["file_path"] for frame in frames if key not in frame]
        if lacking:
            raise DataError(
                f"{file} has no '{key}', and neither has its frame {lacking[0]}. Add it, in pixels, for all frames "
                f"at the top of the file or for each frame."
            )
    model = meta.get("camera_model", "OPENCV")
    if model not in CAMERA_MODEL_TO_TYPE:
        known = ", ".join(CAMERA_MODEL_TO_TYPE)
        raise DataError(f"{file}: camera_model '{model}' is not known. Use one of {known}.")
    photos = [folder / frame["file_path"] for frame in frames]
    _refuse_contradictions(file, photos, poses)
    applied = np.eye(4)
    if "applied_transform" in meta:
        try:
            applied[:3] = np.reshape(meta["applied_transform"], (-1, 4))[:3]
        except (TypeError, ValueError) as error:
            raise DataError(f"{file}: applied_transform is not 3 x 4 numbers. Correct or remove it.") from error
    elif (config.data / "colmap/sparse/0").exists():  # what the parser then takes for granted
        applied[:3, :3] = [[0, 1, 0], [1, 0, 0], [0, 0, -1]]
    scale = float(meta.get("applied_scale", 1.0))
    named = meta.get("ply_file_path") if config.load_3D_points else None
    return Source(file, photos, poses, applied, scale, point_cloud=folder / named if named else None)


def _refuse_contradictions(file: Path, photos: list[Path], poses: np.ndarray) -> None:
    """A photo may be listed twice, but taken from one place only."""
    first: dict[Path, int] = {}
    for index, photo in enumerate(photos):
        twin = first.setdefault(photo, index)
        if not np.array_equal(poses[twin], poses[index], equal_nan=True):
            raise DataError(f"{file} lists {photo} twice with different poses. Keep the frame that is right.")


def _instant_ngp(config: InstantNGPDataParserConfig) -> Source:
    file = config.data if config.data.suffix == ".json" else config.data / "transforms.json"
    meta = _transforms(file)
    poses = _frame_poses(file, meta["frames"])
    photos = [file.parent / frame["file_path"] for frame in meta["frames"]]
    focal_y = float(meta["fl_y"]) if "fl_y" in meta else None
    return Source(file, photos, poses, np.eye(4), focal_y=focal_y)


def _blender(config: BlenderDataParserConfig) -> Source:
    photos, poses = [], []
    for split in ("train", "val", "test"):
        file = config.data / f"transforms_{split}.json"
        if split != "train" and not file.exists():
            continue  # a run needs val, its tools test
        meta = _transforms(file)
        poses.append(_frame_poses(file, meta["frames"]))
        angle = meta.get("camera_angle_x")
        if not isinstance(angle, (int, float)) or not 0 < angle < np.pi:
            raise DataError(
                f"{file}: 'camera_angle_x' is {angle}; it must be the horizontal field of view in radians, 0 to pi."
            )
        photos += [config.data / f"{frame['file_path'].replace('./', '')}.png" for frame in meta["frames"]]
    cloud = None if config.ply_path is None else config.data / config.ply_path
    return Source(config.data / "transforms_train.json", photos, np.concatenate(poses), np.eye(4), point_cloud=cloud)


# COLMAP models ------------------------------------------------------------------------------------------------------


def _colmap(config: ColmapDataParserConfig) -> Source:
    if not config.data.is_dir():
        raise DataError(f"The data folder {config.data} does not exist. Correct --data.")
    folder = config.data / config.colmap_path
    files = [folder / name for name in ("images.txt", "images.bin")]
    file = files[0] if (folder / "cameras.txt").exists() else files[1]  # the parser's choice
    if not file.is_file():
        other = [p for p in ("sparse/0", "sparse", "colmap/sparse/0") if (config.data / p / file.name).is_file()]
        advice = f"Use --colmap-path {other[0]}" if other else "Name the folder of the model with --colmap-path"
        raise DataError(f"{file} does not exist. {advice} (after `colmap`, at the end of the command).")
    try:
        rows = list(_images_text(file) if file.suffix == ".txt" else _images_binary(file))
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {file}: {error}. The model is damaged: export it again from COLMAP.") from error
    if not rows:
        raise DataError(f"{file} holds no images. Check that the reconstruction succeeded, or use --colmap-path.")
    poses = np.stack([_from_colmap(numbers) for _, numbers in rows])
    cloud = None
    if config.load_3D_points:
        cloud = folder / ("points3D.bin" if (folder / "points3D.bin").exists() else "points3D.txt")
    return Source(
        file, [config.data / config.images_path / name for name, _ in rows], poses, np.eye(4), point_cloud=cloud
    )


def _images_binary(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name, and quaternion (wxyz) and translation [7] of each image; keypoints are skipped."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        (count,) = _unpack(stream, "<Q")
        for _ in range(count):
            numbers = np.array(_unpack(stream, "<i7di")[1:8])
            name = bytearray()
            while (byte := _unpack(stream, "<c")[0]) != b"\0":
                name += byte
            (keypoints,) = _unpack(stream, "<Q")
            if stream.seek(24 * keypoints, 1) > size:
                raise ValueError("the file ends too early")
            yield name.decode("utf-8"), numbers


def _unpack(stream: BinaryIO, layout: str) -> tuple[Any, ...]:
    data = stream.read(struct.calcsize(layout))
    if len(data) < struct.calcsize(layout):
        raise ValueError("the file ends too early")
    return struct.unpack(layout, data)


def _images_text(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The same, from lines ``id qw qx qy qz tx ty tz camera name``, each followed by a line of keypoints."""
    lines = (line for line in file.read_text("utf-8").splitlines() if not line.startswith("#"))
    for line in lines:
        if not line.strip():
            continue
        words = line.split(maxsplit=9)
        if len(words) != 10:
            raise ValueError(f"'{line[:60]}' is not a line of ten values")
        next(lines, None)
        yield words[9].strip(), np.array(words[1:8], dtype=np.float64)


def _from_colmap(numbers: np.ndarray) -> np.ndarray:
    """[4, 4] OpenGL camera to world, in COLMAP's world, from quaternion and translation of world to camera."""
    pose = np.eye(4)
    rotation = qvec2rotmat(numbers[:4])
    pose[:3, :3] = rotation.T * np.array([1.0, -1.0, -1.0])
    pose[:3, 3] = -rotation.T @ numbers[4:]
    return pose


# Point clouds -------------------------------------------------------------------------------------------------------


def check_point_cloud(file: Path) -> None:
    """Raises DataError unless a PLY, or the points of a COLMAP model, can be expected to be readable.

    An empty PLY is let through: nerfstudio then starts from random points, as it does without one. What open3d cannot
    read must not end there too.
    """
    if not file.is_file():
        raise DataError(
            f"The point cloud {file} does not exist. Restore it, or train without it: remove its entry "
            f"(ply_file_path, ply-path), or use --load-3D-points False after the data's format."
        )
    if file.suffix == ".ply":
        with open(file, "rb") as stream:
            start = stream.read(65536)
        if not start.startswith(b"ply") or b"element vertex" not in start or b"end_header" not in start:
            raise DataError(f"{file} is not a PLY file with vertices (it starts with {start[:12]!r}). Export it again.")
        needed = _ply_bytes(start)
        if file.stat().st_size < needed:  # open3d would fill up with zeros
            raise DataError(
                f"{file} ends too early: it has {file.stat().st_size:,} bytes, and its vertices need {needed:,}. "
                f"Copy or export it again."
            )
    elif file.suffix == ".bin":
        with open(file, "rb") as stream:
            if not any(stream.read(8)):
                raise _no_points(file)
    elif not any(line.strip() and not line.startswith("#") for line in file.read_text("utf-8").splitlines()):
        raise _no_points(file)


_PLY_SIZES = {
    **dict.fromkeys(("char", "uchar", "int8", "uint8"), 1),
    **dict.fromkeys(("short", "ushort", "int16", "uint16"), 2),
    **dict.fromkeys(("int", "uint", "float", "int32", "uint32", "float32"), 4),
    **dict.fromkeys(("double", "float64"), 8),
}


def _ply_bytes(start: bytes) -> int:
    """Least size of a PLY, from its header: for binary ones with the vertices first, header and vertices."""
    header = start[: start.index(b"end_header")]
    size, elements = len(header), header.decode("latin-1").split("\nelement ")[1:]
    if b"format binary" not in header or not elements[0].startswith("vertex "):
        return size
    count, *properties = elements[0].splitlines()
    kinds = [line.split()[1] for line in properties if line.startswith("property ")]
    return size + int(count.split()[1]) * sum(_PLY_SIZES.get(kind, 0) for kind in kinds)


def _no_points(file: Path) -> DataError:
    return DataError(f"{file} holds no points. Start from random ones with --load-3D-points False after `colmap`.")
