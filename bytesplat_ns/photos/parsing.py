"""nerfstudio's data parsers, kept from what they would get wrong, and their errors made clear."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from nerfstudio.data.dataparsers.base_dataparser import DataParserConfig, DataparserOutputs
from nerfstudio.utils.rich_utils import CONSOLE

from bytesplat_ns.photos.descriptions import DataError, Source

FLOAT32_ROUNDING = 2.0**-24
"""Largest relative error of a number that is stored as float32."""

TOLERANCE = 1e-5
"""Error of a camera's position, relative to the extent of all positions, that does not show: 0.1 px where the cameras
are spread over ten times their distance from things, in a photo of 1000 px."""

RIGID = 1e-2
"""How far from orthonormal a rotation may be: poses are often written with few digits."""


@contextmanager
def explained(config: DataParserConfig) -> Iterator[None]:
    """Turns errors that a nerfstudio data parser raises into DataErrors; all others pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError) or not _raised_by_parser(error):
            raise
        parser = type(config).__name__.removesuffix("Config")
        what, advice = _reading(error)
        raise DataError(
            f"nerfstudio's {parser} cannot read the data set {config.data}: {what.rstrip('.!')}. {advice}"
        ) from error


def _reading(error: Exception) -> tuple[str, str]:
    """What a parser's error means, and what to do."""
    what = " ".join(str(error).split()) or type(error).__name__
    advice = "Correct the data set, or --data and the options after the data's format at the end of the command."
    if isinstance(error, KeyError):
        what = f"the entry {what} is missing"
    elif isinstance(error, EOFError):
        what = "it asked whether to change the data set (see above), and there is no terminal to answer on"
        advice = "Answer it in a terminal once; to use large photos as they are, add --downscale-factor 1."
    elif isinstance(error, struct.error):  # of COLMAP's files, images.bin apart
        what = f"cameras.bin or points3D.bin ends too early ({what})"
        advice = "The model is damaged: copy it, or export it from COLMAP, again."
    elif isinstance(error, NotImplementedError):  # of COLMAP's camera models
        advice = "Undistort the photos first (colmap image_undistorter), or calibrate with another camera model."
    return what, advice


def _raised_by_parser(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("nerfstudio.data.dataparsers"):
            return True
        trace = trace.tb_next
    return False


def check_poses(source: Source) -> None:
    """Raises DataError unless all poses are finite and rigid, and differ where a parser sees them in float32."""
    finite = np.isfinite(source.poses).all(axis=(1, 2))
    rotations = np.where(finite[:, None, None], source.poses[:, :3, :3], np.eye(3))
    error = np.abs(rotations.transpose(0, 2, 1) @ rotations - np.eye(3)).max(axis=(1, 2))
    determinants = np.linalg.det(rotations)
    for index in np.flatnonzero(~finite)[:1]:
        raise DataError(
            f"{source.file}: the pose of {source.photos[index]} holds values that are not finite. "
            f"Remove the frame, or estimate its pose again."
        )
    for index in np.flatnonzero((error > RIGID) | (determinants < 0))[:1]:
        lengths = ", ".join(f"{length:.4g}" for length in np.linalg.norm(rotations[index], axis=0))
        raise DataError(
            f"{source.file}: the pose of {source.photos[index]} is not a rotation and a translation (its axes have the "
            f"lengths {lengths}, its determinant is {determinants[index]:.4g}). Take scale, shear and mirroring out."
        )
    extent, largest = _spread(source.poses[:, :3, 3])
    if extent > 1e-9 * largest and FLOAT32_ROUNDING * largest > 0.25 * extent:
        raise _too_far(source)


def adapt(config: DataParserConfig, source: Source) -> None:
    """Changes options that this data set cannot bear, and says so."""
    extent, largest = _spread(source.poses[:, :3, 3])
    if extent <= 1e-9 * largest and getattr(config, "auto_scale_poses", False):
        config.auto_scale_poses = False  # type: ignore[attr-defined]
        cameras = "The only camera" if len(source.poses) == 1 else f"All {len(source.poses)} cameras"
        CONSOLE.log(
            f"{cameras} of {source.file} at one place: the scene keeps the data set's own unit "
            f"(--auto-scale-poses would divide by the distance between cameras, which is zero)."
        )


def correct(outputs: DataparserOutputs, source: Source) -> None:
    """Puts right, in place, what a parser got wrong; raises DataError where that is not possible.

    Far from the origin, as in georeferenced captures, float32 moves cameras and points by decimetres before a parser
    subtracts their centre. Here they are transformed again in float64, by the very transform that the parser reports.
    """
    if source.focal_y is not None:
        outputs.cameras.fy = torch.full_like(outputs.cameras.fx, source.focal_y)
    if len(outputs.image_filenames) == 0:
        return
    extent, largest = _spread(source.poses[:, :3, 3])
    centred = not torch.equal(outputs.dataparser_transform, torch.eye(4)[:3])
    if centred and FLOAT32_ROUNDING * largest > TOLERANCE * (extent if extent > 1e-9 * largest else 1.0):
        _transform_again(outputs, source)
    poses = outputs.cameras.camera_to_worlds
    if not poses.isfinite().all():
        raise DataError(
            f"The poses of {source.file} are no longer finite once they are oriented and scaled. Try "
            f"--orientation-method none, or --auto-scale-poses False, after the data's format."
        )
    positions = poses[..., 3].double().numpy()
    centre = np.abs(positions.mean(axis=0)).max()
    if extent > 1e-9 * largest and FLOAT32_ROUNDING * centre > TOLERANCE * extent * float(outputs.dataparser_scale):
        raise _too_far(source)


def check_points(outputs: DataparserOutputs, source: Source) -> None:
    """Says how many points cannot be used; raises DataError if there are points and none is finite."""
    points = outputs.metadata.get("points3D_xyz")
    if points is None or source.point_cloud is None:
        return
    finite = int(points.isfinite().all(dim=1).sum())
    if finite == 0:
        raise DataError(
            f"The point cloud {source.point_cloud} has no finite point ({len(points)} found). Export it again, or "
            f"train without it (--load-3D-points False after the data's format, where it has that option)."
        )
    if finite < len(points):
        CONSOLE.log(
            f"{len(points) - finite:,} of the {len(points):,} points in {source.point_cloud} are not finite and left "
            f"out."
        )


def _too_far(source: Source) -> DataError:
    extent, largest = _spread(source.poses[:, :3, 3])
    return DataError(
        f"{source.file}: the cameras are {largest:,.0f} units from the origin but only {extent:,.4g} from each "
        f"other: float32 coordinates would be off by {FLOAT32_ROUNDING * largest:.2g} units. Use --center-method "
        f"poses where the data's format has it, or subtract a common offset from all poses and points."
    )


def _transform_again(outputs: DataparserOutputs, source: Source) -> None:
    transform = np.eye(4)
    transform[:3] = outputs.dataparser_transform.double().numpy()
    transform = transform @ np.linalg.inv(source.applied)  # of the file's world
    scale = float(outputs.dataparser_scale)
    chosen = source.poses[_indices(source, outputs.image_filenames)]
    positions = scale / source.applied_scale * (chosen[:, :3, 3] @ transform[:3, :3].T + transform[:3, 3])
    outputs.cameras.camera_to_worlds[..., 3] = torch.from_numpy(positions).float()
    if "points3D_xyz" in outputs.metadata and source.point_cloud is not None:
        points = scale * (_points(source.point_cloud) @ transform[:3, :3].T + transform[:3, 3])
        outputs.metadata["points3D_xyz"] = torch.from_numpy(points).float()
    _, largest = _spread(source.poses[:, :3, 3])
    CONSOLE.log(
        f"The cameras of {source.file} are up to {largest:,.0f} units from the origin: cameras and points are "
        f"centred in float64, since float32 would be off by {FLOAT32_ROUNDING * largest:.2g} units."
    )


def _indices(source: Source, photos: list[Path]) -> list[int]:
    """Of photos that may come from a folder of downscaled ones, where the parser keeps their names only."""
    by_path = {photo: index for index, photo in enumerate(source.photos)}
    by_name = {photo.name: index for index, photo in enumerate(source.photos)}
    if not all(photo in by_path for photo in photos) and len(by_name) < len(source.photos):
        raise DataError(
            f"{source.file}: photos in several folders have the same name, and downscaled photos are in one. "
            f"Rename them, or train on the photos themselves with --downscale-factor 1."
        )
    return [by_path.get(photo, by_name.get(photo.name, -1)) for photo in photos]


def _points(file: Path) -> np.ndarray:
    """[P, 3] float64, in the order of nerfstudio's parsers."""
    if file.suffix == ".ply":
        import open3d

        return np.asarray(open3d.io.read_point_cloud(str(file)).points)
    from nerfstudio.data.utils import colmap_parsing_utils as colmap

    read = colmap.read_points3D_binary if file.suffix == ".bin" else colmap.read_points3D_text
    return np.array([point.xyz for point in read(file).values()])


def _spread(positions: np.ndarray) -> tuple[float, float]:
    """Extent of positions [N, 3], and their largest coordinate."""
    return float(np.ptp(positions, axis=0).max()), float(np.abs(positions).max())
