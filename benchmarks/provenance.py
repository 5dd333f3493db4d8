"""What every result says of its origin. A result that names no commit cannot be repeated, so there is none."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def provenance(argv: Sequence[str] | None = None) -> dict[str, str]:
    """Date, commit, command, device and versions, for the head of a result. Ask before measuring.

    Args:
        argv: the script and its arguments; default: those of this process.

    Raises:
        SystemExit: the commit is not known.
    """
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "command": command(sys.argv if argv is None else argv),
        "device": device(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit(root: Path = ROOT) -> str:
    """What BYTESPLAT_COMMIT says, for copies of the sources without git; else the commit that is checked out.

    Raises:
        SystemExit: there is neither.
    """
    if named := os.environ.get("BYTESPLAT_COMMIT"):
        return named
    # A copy may lie in the checkout of something else.
    if (top := _git(root, "rev-parse", "--show-toplevel")) and Path(top).resolve() == root.resolve():
        changed = " with changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
        return f"{_git(root, 'rev-parse', '--short', 'HEAD')}{changed}"
    raise SystemExit(
        f"{root} is no git checkout, so the result could not say which commit it is of: set BYTESPLAT_COMMIT to it."
    )


def _git(root: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""


def command(argv: Sequence[str]) -> str:
    """The command as one would type it in a checkout: paths that lead out of it are cut down to their last part."""
    return shlex.join(["python", f"benchmarks/{Path(argv[0]).name}", *map(_short, argv[1:])])


def _short(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    elsewhere = value.startswith(("/", "..", "~"))
    return option + equals + (Path(value).name if elsewhere else value)


def device() -> str:
    """The GPU, or the CPU where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_model()


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
