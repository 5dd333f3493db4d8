"""Gaussians from files of any kind that is read here: checkpoints of this method and of splatfacto, PLY, SPZ."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Gaussians
from bytesplat_ns.parallel.checkpoint import BLOCK, Rows, open_rows
from bytesplat_ns.run.stored_config import read_run_config
from bytesplat_ns.splats import ply, spz
from bytesplat_ns.splats.initialization import SH_C0

FADED = math.log(1 / 254)
"""Logit of 1/255: fainter Gaussians are never drawn."""


class SplatError(ValueError):
    """A file holds no Gaussians that can be used."""


@dataclass
class Splats:
    """Raw parameters by name, float32, on the CPU; shapes as in ``ops.layout.Gaussians``, without ids."""

    parameters: dict[str, Tensor]
    source: str  # what the file is, for messages
    run: Path | None = None  # folder of the run that a checkpoint belongs to
    antialiased: bool | None = None  # how they are meant to be drawn, where that is known

    def __len__(self) -> int:
        return len(self.parameters["means"])

    @property
    def sh_degree(self) -> int:
        return round((self.parameters["features_rest"].shape[1] + 1) ** 0.5) - 1

    def usable(self) -> Tensor:
        """[N] bool: all numbers are finite, and there is an orientation."""
        finite = [p.isfinite().flatten(1).all(dim=1) for p in self.parameters.values()]
        return torch.stack([*finite, self.parameters["quats"].ne(0).any(dim=1)]).all(dim=0)

    def blocks(self) -> Iterator[Splats]:
        """The same, some at a time."""
        for first in range(0, len(self), BLOCK):
            rows = {name: p[first : first + BLOCK] for name, p in self.parameters.items()}
            yield Splats(rows, self.source, self.run, self.antialiased)

    def whole(self) -> Splats:
        return self

    def keep(self, rows: Tensor) -> None:
        """Leaves the rows of a bool mask [N] or of indices."""
        if rows.dtype == torch.bool and bool(rows.all()):
            return
        self.parameters = {name: p[rows] for name, p in self.parameters.items()}


@dataclass(frozen=True)
class ShardedSplats:
    """Gaussians of a checkpoint of shards, of any number, in the order of ids: read as they are needed."""

    rows: Rows
    run: Path
    antialiased: bool | None

    def __len__(self) -> int:
        return self.rows.count

    @property
    def sh_degree(self) -> int:
        return round((self.rows.shape("features_rest")[0] + 1) ** 0.5) - 1

    def blocks(self) -> Iterator[Splats]:
        for _, parameters in self.rows.blocks(Gaussians.PARAMETERS):
            yield self._splats(parameters)

    def whole(self) -> Splats:
        """All in memory."""
        return self._splats({name: self.rows[name] for name in Gaussians.PARAMETERS})

    def _splats(self, parameters: dict[str, Tensor]) -> Splats:
        return Splats(parameters, "checkpoint of bytesplat", self.run, self.antialiased)


def read(path: Path) -> Splats:
    """Reads a file by its ending: ``.ckpt``, ``.ply`` or ``.spz``.

    Raises:
        SplatError: the file is missing, or of another kind; the message says what was found and what to do.
    """
    if path.is_dir():
        raise SplatError(f"{path} is a folder; name a file in it: a .ckpt, .ply or .spz with Gaussians.")
    if not path.is_file():
        raise SplatError(f"There is no file {path}.")
    ending = path.suffix.lower()
    if ending == ".ckpt":
        return open_checkpoint(path).whole()
    try:
        if ending == ".ply":
            return _checked(path, Splats(_from_ply(path), "PLY"))
        if ending == ".spz":
            parameters, antialiased = spz.read(path)
            return _checked(path, Splats(parameters, "SPZ", antialiased=antialiased))
    except (ply.PlyError, spz.SpzError) as error:
        raise SplatError(str(error)) from error
    raise SplatError(f"{path} ends in '{path.suffix}'; Gaussians are read from .ckpt, .ply and .spz files.")


def _from_ply(path: Path) -> dict[str, Tensor]:
    names = ply.read_vertices(path).keys()
    if "scale_0" not in names:
        raise SplatError(
            f"{path} holds a point cloud ({', '.join(names)}), no Gaussians. To start from points, name the file as "
            "'ply_file_path' in transforms.json."
        )
    return ply.read_gaussians(path)


def open_checkpoint(path: Path) -> Splats | ShardedSplats:
    """Gaussians of a checkpoint of this method, or of splatfacto with its old or new names of parameters.

    Nothing in the file is executed: only tensors, plain Python values and numpy scalars are accepted.

    Raises:
        CheckpointError: a shard is missing or damaged.
        SplatError: the file is damaged, or holds another method's model.
    """
    try:
        with _numpy_scalars_are_safe():
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        found = f"it wants to run {unsafe[1]}" if unsafe else "it is damaged, or was not written by torch.save"
        # Without torch's error, which advises to load such a file in the unsafe way.
        raise SplatError(f"{path} cannot be read as a checkpoint: {found}.") from None
    pipeline = state.get("pipeline") if isinstance(state, dict) else None
    if not isinstance(pipeline, dict):
        raise SplatError(f"{path} is not a nerfstudio checkpoint: it has no section 'pipeline'.")
    run = path.absolute().parent.parent
    config = run / "config.yml"
    antialiased = read_run_config(config).antialiased if config.is_file() else None
    if "shards" in state.get("bytesplat", ()):
        shards = ShardedSplats(open_rows(path)[1], run, antialiased)
        _refuse_empty(path, len(shards))
        return shards
    weights = {name.replace("module.", "").removeprefix("_model."): value for name, value in pipeline.items()}
    prefix = "gauss_params." if "gauss_params.means" in weights else ""
    missing = [name for name in Gaussians.PARAMETERS if f"{prefix}{name}" not in weights]
    if missing:
        found = ", ".join(sorted({name.split(".")[0] for name in weights})[:8])
        raise SplatError(
            f"{path} holds no Gaussians (no '{missing[0]}'; found {found}). Checkpoints of bytesplat and splatfacto do."
        )
    parameters = {name: weights[prefix + name].float() for name in Gaussians.PARAMETERS}
    stock = "bytesplat" not in state
    if stock and parameters["features_rest"].shape[1] == 0:  # splatfacto without harmonics trains logits of colours
        parameters["features_dc"] = (parameters["features_dc"].sigmoid() - 0.5) / SH_C0
    source = "checkpoint of splatfacto" if stock else "checkpoint of bytesplat"
    return _checked(path, Splats(parameters, source, run, antialiased))


def _checked(path: Path, splats: Splats) -> Splats:
    """Refuses arrays that do not fit together."""
    n, degree = len(splats), splats.sh_degree
    shapes = {"means": 3, "quats": 4, "scales": 3, "opacities": 1, "features_dc": 3}
    expected: dict[str, tuple[int, ...]] = {name: (n, width) for name, width in shapes.items()}
    expected["features_rest"] = (n, (degree + 1) ** 2 - 1, 3)
    for name, shape in expected.items():
        found = tuple(splats.parameters[name].shape)
        if found != shape:
            raise SplatError(f"{path}: {name} has shape {list(found)}, expected {list(shape)}.")
    _refuse_empty(path, n)
    return splats


def _refuse_empty(path: Path, count: int) -> None:
    if count == 0:
        raise SplatError(f"{path} holds no Gaussians: it is empty.")


@contextmanager
def _numpy_scalars_are_safe() -> Iterator[None]:
    """Lets torch's safe loader accept the numpy scalars that nerfstudio saves, under numpy 1's and 2's names."""

    def scalar(*arguments: Any) -> Any:
        return np.float64(0).__reduce__()[0](*arguments)

    def named(module: str) -> Callable[..., Any]:
        function = lambda *arguments: scalar(*arguments)  # noqa: E731
        function.__module__ = module
        function.__name__ = function.__qualname__ = "scalar"  # torch looks at one or the other
        return function

    allowed = [named("numpy.core.multiarray"), named("numpy._core.multiarray"), np.dtype]
    allowed += [type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?")]
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(allowed)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
