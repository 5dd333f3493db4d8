"""Gaussians as PLY files in the layout of the 3D Gaussian Splatting release, written and read in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_TYPES = {"float": "<f4", "float32": "<f4", "uchar": "u1", "uint8": "u1", "double": "<f8", "float64": "<f8"}
_ROWS = 4096
_SH_C0 = 0.28209479177387814  # the constant spherical harmonic


class PlyError(ValueError):
    """A file is not a PLY file of Gaussians."""


def write_vertices(
    path: str | Path, count: int, properties: Mapping[str, np.ndarray], comments: Sequence[str] = ()
) -> None:
    """Writes a binary little-endian PLY with one element ``vertex``.

    Args:
        count: number of vertices.
        properties: by name, in order, [count] or [count, 1]; floating point is written as float32, uint8 as uchar.
        comments: lines for the header.

    Raises:
        PlyError: a property has another length or type.
    """
    _write_blocks(path, count, [(count, properties)], comments)


def _write_blocks(
    path: str | Path,
    count: int,
    blocks: Iterable[tuple[int, Mapping[str, np.ndarray]]],
    comments: Sequence[str],
) -> None:
    """The same for vertices that come in blocks, at least one: their number, and their properties."""
    blocks = iter(blocks)
    first = next(blocks)
    types = {name: "u1" if values.dtype == np.uint8 else "<f4" for name, values in first[1].items()}
    header = ["ply", "format binary_little_endian 1.0", "comment written by bytesplat-ns"]
    header += [f"comment {line}" for line in comments]
    header.append(f"element vertex {count}")
    header += [f"property {'uchar' if kind == 'u1' else 'float'} {name}" for name, kind in types.items()]
    header = "\n".join([*header, "end_header\n"])
    table = np.empty(min(count, _ROWS), list(types.items()))
    _check(path, *first)
    with open(path, "wb") as file:
        file.write(header.encode())
        for n, properties in chain([first], blocks):
            columns = {name: values.reshape(-1) for name, values in properties.items()}
            for start in range(0, n, _ROWS):  # few enough rows to stay in the processor's cache
                rows = table[: min(_ROWS, n - start)]
                for name, values in columns.items():
                    rows[name] = values[start : start + len(rows)]
                rows.tofile(file)


def _check(path: str | Path, count: int, properties: Mapping[str, np.ndarray]) -> None:
    for name, values in properties.items():
        if values.size != count or not (values.dtype.kind == "f" or values.dtype == np.uint8):
            raise PlyError(
                f"{path}: property {name} has {values.size} values of type {values.dtype}; "
                f"expected {count} floating point or uint8 values."
            )


def read_vertices(path: str | Path) -> dict[str, np.ndarray]:
    """Reads element ``vertex`` of a binary little-endian PLY: arrays [count] by property name.

    Raises:
        PlyError: the file is not such a PLY, or is shorter than its header says.
    """
    with open(path, "rb") as file:
        if file.readline().strip() != b"ply":
            raise PlyError(f"{path} does not begin with 'ply'.")
        count, columns, element = None, [], None
        for line in iter(file.readline, b""):
            words = line.decode("ascii", "replace").split()
            if words[:1] == ["format"] and words[1] != "binary_little_endian":
                raise PlyError(f"{path} has format {words[1]}; only binary_little_endian is read.")
            if words[:1] == ["element"]:
                element = words[1]
                if element == "vertex":
                    count = int(words[2])
                elif element == "chunk":
                    raise PlyError(f"{path} is a compressed PLY, which is not read: convert it to a plain PLY or SPZ.")
                elif count is None:
                    raise PlyError(f"{path}: the first element is {element}; it must be vertex.")
            if words[:1] == ["property"] and element == "vertex":
                if words[1] not in _TYPES:
                    raise PlyError(f"{path}: property {words[-1]} has type {words[1]}, which is not read.")
                columns.append((words[2], _TYPES[words[1]]))
            if words == ["end_header"]:
                break
        else:
            raise PlyError(f"{path} ends within its header.")
        if count is None:
            raise PlyError(f"{path} has no element 'vertex'.")
        table = np.fromfile(file, dtype=columns, count=count)
        if len(table) != count:
            raise PlyError(f"{path} holds {len(table)} of the {count} vertices that its header names.")
    return {name: table[name] for name, _ in columns}


def write_gaussian_blocks(
    path: str | Path,
    count: int,
    blocks: Iterable[Mapping[str, Tensor]],
    rgb: bool = False,
    comments: Sequence[str] = (),
) -> None:
    """Writes ``count`` Gaussians with the properties of the 3DGS release.

    Args:
        blocks: raw parameters (shapes as in ``ops.layout.Gaussians``), at least one block; they are never in memory
            together.
        rgb: write the base colours as uchar ``red, green, blue`` instead of the harmonics.
        comments: lines for the header.
    """
    _write_blocks(path, count, ((len(block["means"]), _properties(block, rgb)) for block in blocks), comments)


def _properties(parameters: Mapping[str, Tensor], rgb: bool) -> dict[str, np.ndarray]:
    values = {name: tensor.detach().cpu().numpy() for name, tensor in parameters.items()}
    n = len(values["means"])
    properties = {name: values["means"][:, i] for i, name in enumerate("xyz")}
    properties |= dict.fromkeys(("nx", "ny", "nz"), np.broadcast_to(np.float32(0), n))
    if rgb:
        colors = ((values["features_dc"] * _SH_C0 + 0.5).clip(0, 1) * 255).astype(np.uint8)
        properties |= {name: colors[:, i] for i, name in enumerate(("red", "green", "blue"))}
    else:
        properties |= {f"f_dc_{i}": values["features_dc"][:, i] for i in range(3)}
        rest = values["features_rest"]
        bases = rest.shape[1]  # stored channel by channel
        properties |= {f"f_rest_{c * bases + k}": rest[:, k, c] for c in range(3) for k in range(bases)}
    properties["opacity"] = values["opacities"][:, 0]
    properties |= {f"scale_{i}": values["scales"][:, i] for i in range(3)}
    properties |= {f"rot_{i}": values["quats"][:, i] for i in range(4)}
    return properties


def read_gaussians(path: str | Path) -> dict[str, Tensor]:
    """Raw parameters by name from a 3DGS PLY, float32, shapes as in ``ops.layout.Gaussians`` (ids are not stored).

    Raises:
        PlyError: a property is missing.
    """
    vertices = read_vertices(path)

    def columns(*names: str) -> Tensor:
        missing = [name for name in names if name not in vertices]
        if missing:
            raise PlyError(f"{path} lacks the property {missing[0]} of a Gaussian splat.")
        return torch.from_numpy(np.stack([vertices[name] for name in names], axis=1).astype(np.float32))

    if "f_dc_0" not in vertices and "red" in vertices:  # written with --ply-color-mode rgb
        features_dc = (columns("red", "green", "blue") / 255 - 0.5) / _SH_C0
    else:
        features_dc = columns("f_dc_0", "f_dc_1", "f_dc_2")
    rest = sum(name.startswith("f_rest_") for name in vertices)
    features_rest = torch.zeros(len(vertices["x"]), 0, 3)
    if rest:  # stored channel by channel
        features_rest = columns(*[f"f_rest_{i}" for i in range(rest)]).unflatten(1, (3, rest // 3)).transpose(1, 2)
    return {
        "means": columns("x", "y", "z"),
        "quats": columns("rot_0", "rot_1", "rot_2", "rot_3"),
        "scales": columns("scale_0", "scale_1", "scale_2"),
        "opacities": columns("opacity"),
        "features_dc": features_dc,
        "features_rest": features_rest.contiguous(),
    }
