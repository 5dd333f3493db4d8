"""The environment that `make` builds, with small environments in place of the real one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`.ci/environment.py`, whose `.venv` is a temporary one and whose dependencies are one module and one command."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".ci/environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make_shared(folder: Path) -> None:
        module.make_venv(folder, "--without-pip")
        (folder / module.SITE_PACKAGES / "dependency.py").write_text("")
        command = folder / "bin/which-python"
        command.write_text(f"#!{folder}/bin/python\nimport dependency, sys\nprint(sys.prefix, *sys.argv[1:])\n")
        command.chmod(0o755)

    monkeypatch.setattr(module, "VENV", tmp_path / "check out" / ".venv")
    monkeypatch.setattr(module, "make_shared", make_shared)
    return module


def test_layer_runs_shared_packages_as_its_own(environment: ModuleType, tmp_path: Path) -> None:
    shared = tmp_path / "cache" / "env-1"
    environment.ensure_shared(shared, "1")
    environment.make_layer(shared)
    printed = subprocess.check_output([environment.VENV / "bin/which-python", "a b"], text=True)
    assert printed == f"{environment.VENV} a b\n"
    program = "import site, sys; print(*site.getsitepackages(), sep='\\n')"
    searched = subprocess.check_output([environment.VENV / "bin/python", "-c", program], text=True).splitlines()
    assert {str(folder / environment.SITE_PACKAGES) for folder in (environment.VENV, shared)} <= set(searched)


def test_interrupted_build_begins_again_and_a_finished_one_stays(environment: ModuleType, tmp_path: Path) -> None:
    shared = tmp_path / "env-1"
    shared.mkdir()
    (shared / "half").touch()
    environment.ensure_shared(shared, "1")
    assert not (shared / "half").exists()
    (shared / "kept").touch()
    environment.ensure_shared(shared, "1")
    assert (shared / "kept").exists()


def test_old_environments_are_deleted_but_for_the_newest(environment: ModuleType, tmp_path: Path) -> None:
    for age, name in enumerate(("env-newest", "env-older", "env-oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / environment.STAMP).write_text("0")
        os.utime(tmp_path / name / environment.STAMP, (1e9 - age, 1e9 - age))
    (tmp_path / "somebody-elses").mkdir()
    environment.ensure_shared(tmp_path / "env-1", "1")
    assert {entry.name for entry in tmp_path.iterdir() if entry.is_dir()} == {"env-1", "env-newest", "somebody-elses"}


def test_missing_compiler_is_named(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(SystemExit, match=r"apt-get install g\+\+"):
        environment.check_system()


def test_unsupported_python_is_named(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    with pytest.raises(SystemExit, match=r"needs Python 3\.10, 3\.11 or 3\.12.*PYTHON="):
        environment.check_python()
