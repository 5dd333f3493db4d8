"""Compiles csrc/cpu into the libraries that ``cpu.py`` calls: one for each level of the x86-64 instruction set.

    python -m bytesplat_ns.ops.cpu_build    # into the package's own folder, if the sources have changed

Standard library only, so that an installer can use this file before torch is there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .sources import csrc

FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility-inlines-hidden", "-pthread", "-fopenmp-simd"),
    # No caller reads errno or floating-point exception flags. NaN and infinity keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math"),
)

LEVELS: dict[str, tuple[str, ...]] = {
    "v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),  # AVX-512
    "v3": ("-march=x86-64-v3",),  # AVX2, FMA
    "base": (),  # what every CPU of the platform has
}
"""Compiler flags by level, best first; off x86-64 there is only ``base``."""

if platform.machine() not in ("x86_64", "AMD64"):
    LEVELS = {"base": ()}


class BuildError(RuntimeError):
    """The C++ compiler is missing, or rejects the sources."""


def library(folder: Path, level: str) -> Path:
    """Where the library of a level lies in a folder."""
    return folder / f"_cpu_{level}.so"


def build(out_dir: Path, levels: Iterable[str] = tuple(LEVELS)) -> list[Path]:
    """Compiles the libraries of some levels into ``out_dir`` and returns their paths.

    A library that was made of these sources is left as it is. The compiler is ``$CXX``, or else ``g++``.

    Raises:
        BuildError: with the command and what the compiler said.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda level: _build_level(library(out_dir, level), LEVELS[level]), levels))


def fingerprint() -> str:
    """Of all that the libraries are made of, as it is now; a library carries the one of its own (``sources.cpp``)."""
    root, digest = csrc(), hashlib.sha256()
    inputs = [*(root / "cpu").glob("*.cpp"), *(root / "cpu").glob("*.h"), *(root / "common").glob("*.h")]
    for path in (*sorted(inputs), Path(__file__)):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _build_level(target: Path, flags: tuple[str, ...]) -> Path:
    sources, made_of = sorted((csrc() / "cpu").glob("*.cpp")), fingerprint()
    if target.exists() and made_of.encode() in target.read_bytes():
        return target
    definition = f'-DBYTESPLAT_SOURCES="{made_of}"'
    # Into a folder of its own, then renamed: a process may have the old library loaded.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder) / target.name
        command = [*shlex.split(os.environ.get("CXX", "g++")), *FLAGS, *flags, definition]
        command += [*map(str, sources), "-o", str(draft)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BuildError(f"cannot run the C++ compiler {command[0]!r} (set CXX to another): {error}") from error
        if result.returncode != 0:
            raise BuildError(f"{shlex.join(command)}\n{result.stderr}")
        draft.replace(target)
    return target


if __name__ == "__main__":
    try:
        for path in build(Path(__file__).resolve().parent):
            print(path)
    except BuildError as error:
        sys.exit(f"bytesplat-ns: the CPU kernels were not built: {error}")
