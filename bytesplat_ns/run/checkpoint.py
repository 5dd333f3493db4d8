"""Checkpoint files: written aside and renamed, loadable with torch's safe default, stock layout plus one section.

A file ``step-NNNNNNNNN.ckpt`` holds what nerfstudio's tools read (``step``, ``pipeline``, ``optimizers``,
``schedulers``, ``scalers``) and a section ``bytesplat`` with what resuming needs besides. All per-Gaussian tensors
are rows keyed by ``ids``. Randomness is counter-based (seed, images seen, id), so there is no generator state.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

VERSION = 1
_START = "To start a new run from the Gaussians of splatfacto's checkpoint, give it to --pipeline.model.init-from."
_NAME = re.compile(r"step-(\d{9})\.ckpt$")
_ASIDE = "unfinished-000000000.part"
"""What is being written. Nerfstudio's tools read a step out of the name of every file in the folder and take the
highest: one that a killed process left must not look like the latest."""
_SHARD = "shard-000000000."
"""How names of shards begin, for the same reason."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, or of another kind."""


def path_for(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.ckpt"


def shard_name(path: Path, mark: str, rank: int) -> str:
    """Name of the file with one rank's part of a checkpoint, beside its index ``path``: the checkpoint that ``mark``
    tells from others of the step. To nerfstudio's tools it is of step 0."""
    return f"{_SHARD}{path.stem}.{mark}.rank-{rank:04d}.pt"


def write(path: Path, state: dict[str, Any]) -> None:
    """Writes ``state`` so that ``path`` is whole or untouched, whatever happens meanwhile."""
    aside = path.with_name(_ASIDE)
    with _explained(path, aside):
        save(aside, plain(state))
        os.replace(aside, path)


def write_shard(path: Path, tables: dict[str, torch.Tensor]) -> None:
    """Writes a file that nothing refers to yet: what is left of it if that fails is in nobody's way."""
    with _explained(path, path):
        save(path, tables)


def save(path: Path, value: Any) -> None:
    """Writes tensors one by one, and returns once they are on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _explained(path: Path, aside: Path) -> Iterator[None]:
    """Removes what was begun where writing fails, and says what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            aside.unlink()
        # After a failed write torch's archive cannot be closed, which raises a RuntimeError that says nothing.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"Could not write the checkpoint {path}: {reason}. Earlier checkpoints are untouched. "
            "Make room on that disk, or give --output-dir a place on another one."
        ) from error


def load(path: Path) -> Any:
    """Loads a file onto the CPU with ``weights_only``. Tensors are mapped into memory: what is not used is not read."""
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # Without torch's advice to load it in the unsafe way, which other methods' numpy scalars provoke.
        found = f"{type(error).__name__}: {str(error).splitlines()[0].split('. ')[0]}" if str(error) else repr(error)
        raise CheckpointError(f"{path} cannot be read as a checkpoint of bytesplat ({found}). {_START}") from None


def read(path: Path) -> dict[str, Any]:
    """Loads a checkpoint of this method, of which shards have the Gaussians if its section has ``shards``."""
    state = load(path)
    section = state.get("bytesplat") if isinstance(state, dict) else None
    if section is None:
        raise CheckpointError(
            f"{path} is not a bytesplat checkpoint (no 'bytesplat' section): training can be resumed only from this "
            f"method's own checkpoints. {_START}"
        )
    if section["version"] != VERSION:
        raise CheckpointError(f"{path} has checkpoint version {section['version']}, this program reads {VERSION}.")
    return state


def find(folder: Path, step: int | None) -> Path:
    """The checkpoint of ``step`` in ``folder``, or the latest one."""
    if not folder.is_dir():
        raise CheckpointError(f"--load-dir {folder} is not a folder.")
    steps = _steps(folder)
    if not steps:
        raise CheckpointError(f"--load-dir {folder} holds no file named step-NNNNNNNNN.ckpt.")
    if step is not None and step not in steps:
        raise CheckpointError(f"--load-step {step}: {folder} holds steps {', '.join(map(str, steps))}.")
    return path_for(folder, steps[-1] if step is None else step)


def latest(folder: Path) -> Path | None:
    """The latest checkpoint in a folder, None if there is none."""
    steps = _steps(folder) if folder.is_dir() else []
    return path_for(folder, steps[-1]) if steps else None


def how_to_resume(folder: Path, command: str, given: Sequence[str]) -> str:
    """What to do to go on from the latest checkpoint in ``folder``.

    Args:
        command: what the user's command line begins with. Options come right after it, ahead of a data parser's.
        given: options among those of the last time that the new one replaces.
    """
    path = latest(folder)
    if path is None:
        return "There is no checkpoint to go on from: start again with the same command."
    instead = f", in place of {', '.join(given)}" if given else ""
    return (
        f"To go on from {path.name}, give the same command with this right after '{command}'{instead}:\n"
        f"--load-dir {shlex.quote(str(folder.absolute()))}"
    )


def _steps(folder: Path) -> list[int]:
    return sorted(int(match.group(1)) for name in os.listdir(folder) if (match := _NAME.match(name)))


def remove_others(path: Path) -> None:
    """Deletes the other checkpoints in the folder of ``path``, and what interrupted writes left behind.

    Shards go last, so that there never is an index without its shards.
    """
    own = {path.name, *read(path)["bytesplat"].get("shards", ())}
    for other in sorted(path.parent.iterdir(), key=lambda other: other.name.startswith(_SHARD)):
        ours = _NAME.match(other.name) or other.name == _ASIDE or other.name.startswith(_SHARD)
        if ours and other.name not in own:
            try:
                other.unlink()
            except OSError as error:
                raise CheckpointError(f"{path} is written, but {other} cannot be deleted: {error}.") from error


def plain(value: Any) -> Any:
    """The same structure with numpy scalars as Python numbers, which torch's safe loader accepts."""
    if isinstance(value, dict):
        return type(value)((key, plain(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    if hasattr(value, "item") and not isinstance(value, torch.Tensor):
        return value.item()
    return value
