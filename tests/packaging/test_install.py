"""What pip installs: from a wheel, from a checkout, and where there is no compiler."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bytesplat_ns"

COMPILER = """#!/bin/sh
for word; do case $word in *.so) : >"$word";; esac; done
"""
"""Leaves an empty library where a real compiler would take half a minute; whether the libraries work is tested with the
stages."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources, so that nothing is built among the real ones."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("bytesplat_ns", "csrc", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=built)
    return copy


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o755)
    return path


def pip(*arguments: str | Path, compiler: Path | str) -> str:
    """Runs pip offline, in the environment of the tests, and returns what it printed."""
    command = [sys.executable, "-m", "pip", "--verbose", *map(str, arguments), "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "CXX": str(compiler)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def kernel_sources(installed: Path) -> Path:
    """Where an installed package, given by its folder, looks for the kernel sources."""
    return runpy.run_path(str(installed / "ops/sources.py"))["csrc"]()


def files(folder: Path, *patterns: str) -> set[str]:
    return {str(path.relative_to(folder)) for pattern in patterns for path in folder.rglob(pattern)}


def test_wheel_is_complete(checkout: Path, compiler: Path, tmp_path: Path) -> None:
    pip("wheel", checkout, "--wheel-dir", tmp_path, compiler=compiler)
    (wheel,) = tmp_path.glob("bytesplat_ns-*-py3-none-linux_*.whl")

    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    installed = tmp_path / "site/bytesplat_ns"
    assert {path.name for path in (tmp_path / "site").iterdir() if path.suffix != ".dist-info"} == {"bytesplat_ns"}
    assert files(installed, "*.py") == files(PACKAGE, "*.py")
    assert files(installed / "csrc", "*.*") == files(ROOT / "csrc", "*.h", "*.cpp", "*.cu")
    assert {"ops/_cpu_base.so"} <= files(installed, "*.so")
    (commands,) = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    assert "bytesplat-export = bytesplat_ns.export.command:main" in commands.read_text()
    assert kernel_sources(installed) == installed / "csrc"


def test_editable_install_uses_the_checkout(checkout: Path, compiler: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--target", site, "--editable", checkout, compiler=compiler)
    # Isolated from the environment of the tests, in which the package may be installed too.
    program = f"import site; site.addsitedir({str(site)!r}); import bytesplat_ns; print(bytesplat_ns.__file__)"
    imported = subprocess.check_output([sys.executable, "-ISc", program], text=True).strip()
    assert imported == str(checkout / "bytesplat_ns/__init__.py")
    assert {"ops/_cpu_base.so"} <= files(checkout / "bytesplat_ns", "*.so")
    assert kernel_sources(checkout / "bytesplat_ns") == checkout / "csrc"


def test_without_a_compiler_the_installation_succeeds_and_says_so(checkout: Path, tmp_path: Path) -> None:
    printed = pip("wheel", checkout, "--wheel-dir", tmp_path, compiler="/nonexistent")
    (line,) = (line for line in printed.splitlines() if line.lstrip().startswith("bytesplat-ns:"))
    assert "no CPU kernels" in line and "'/nonexistent'" in line
    (wheel,) = tmp_path.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_source_distribution_can_be_built_from(checkout: Path, compiler: Path, tmp_path: Path) -> None:
    program = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    subprocess.run([sys.executable, "-c", program], cwd=checkout, check=True, capture_output=True)
    (source,) = tmp_path.glob("*.tar.gz")
    pip("wheel", source, "--wheel-dir", tmp_path, compiler=compiler)
    (wheel,) = tmp_path.glob("*.whl")
    assert "bytesplat_ns/csrc/common/platform.h" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize("name", ["bytesplat", "bytesplat-big", "bytesplat-mcmc"])
def test_nerfstudio_finds_the_methods(name: str) -> None:
    (entry,) = entry_points(group="nerfstudio.method_configs", name=name)
    place = f"bytesplat_ns.config:{name.replace('-', '_')}"
    assert entry == EntryPoint(name, place, "nerfstudio.method_configs")
    assert entry.load().config.method_name == name
