"""Make `.venv`: this checkout, installed editable, with everything that its tests need.

By default `.venv` holds its dependencies itself. They take 8 GB and minutes, so where BYTESPLAT_ENV_CACHE
names a folder they live there, one environment for each set of dependencies and Python, and `.venv` is a thin
layer over it: it sees the dependencies and has their commands, and only the package itself is its own.
Checkouts can share an environment, since none installs itself there.

Does nothing when `.venv` is as it should be already. Needs the standard library only.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / ".ci/constraints.txt"
SITE_PACKAGES = Path("lib", "python{}.{}".format(*sys.version_info), "site-packages")
STAMP = "complete"  # written last into an environment: the key of what it was made from


def main():
    check_python()
    dependencies = key(requirements(), CONSTRAINTS.read_text())
    layout = key(*(file.read_text() for file in (PROJECT, ROOT / "setup.py", Path(__file__))))
    cache = os.environ.get("BYTESPLAT_ENV_CACHE")
    environment = Path(cache).expanduser().absolute() / f"env-{dependencies}" if cache else VENV
    if stamp(VENV) == f"{environment} {dependencies} {layout}" and environment.is_dir():
        return
    check_system()
    if cache:
        ensure_shared(environment, dependencies)
        make_layer(environment)
        install(VENV, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    else:
        # A layer, or a venv of another Python, has no pip of its own here and is made anew.
        make_venv(VENV, *([] if (VENV / SITE_PACKAGES / "pip").is_dir() else ["--clear"]))
        install_with_dependencies(VENV)
    (VENV / STAMP).write_text(f"{environment} {dependencies} {layout}")


def check_python():
    if not (3, 10) <= sys.version_info < (3, 13):
        raise SystemExit(
            f"bytesplat-ns needs Python 3.10, 3.11 or 3.12, but {sys.executable} is "
            f"{platform.python_version()}. Name another one, for example: make test PYTHON=python3.12"
        )


def check_system():
    """Name the Debian packages without which the installation fails, or nerfstudio does not run."""
    present = {
        "g++": has_openmp_compiler(),  # also for two dependencies that come as source only
        "python3-dev": Path(sysconfig.get_path("include"), "Python.h").is_file(),  # for the same two
        "python3-venv": importlib.util.find_spec("ensurepip") is not None,
        "libgl1": has_library("libGL.so.1"),  # open3d and pymeshlab link it, even where nothing is drawn
        "libopengl0": has_library("libOpenGL.so.0"),  # and so do pymeshlab's plugins
    }
    missing = [package for package, found in present.items() if not found]
    if missing:
        raise SystemExit(f"Missing on this system; on Debian and Ubuntu: apt-get install {' '.join(missing)}")


def has_openmp_compiler():
    command = [os.environ.get("CXX", "g++"), "-fopenmp", "-fsyntax-only", "-xc++", "-"]
    try:
        return not subprocess.run(command, input=b"#include <omp.h>", capture_output=True).returncode
    except OSError:
        return False


def has_library(name):
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def requirements():
    """What the project requires; all that pyproject.toml says where Python, before 3.11, cannot read it."""
    text = PROJECT.read_text()
    if sys.version_info < (3, 11):
        return text
    import tomllib

    project = tomllib.loads(text)["project"]
    return json.dumps([project["dependencies"], project["optional-dependencies"]])


def key(*texts):
    """Digest of these texts and of the Python that runs."""
    return hashlib.sha256("\0".join([sys.version, platform.machine(), *texts]).encode()).hexdigest()[:16]


def stamp(environment):
    file = environment / STAMP
    return file.read_text() if file.is_file() else None


def ensure_shared(environment, dependencies):
    """Build the shared environment, unless it is there. Others wait meanwhile; a build that was cut short has
    no stamp and is begun again."""
    cache = environment.parent
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp(environment) == dependencies:
            return
        # Each takes 8 GB: keep but the newest of the others, which a neighbouring checkout may be using.
        others = [other for other in cache.glob("env-*") if stamp(other)]
        newest = max(others, key=lambda other: (other / STAMP).stat().st_mtime, default=None)
        for other in cache.glob("env-*"):
            if other != newest:
                shutil.rmtree(other)
        make_shared(environment)
        (environment / STAMP).write_text(dependencies)


def make_shared(environment):
    """A virtual environment with the dependencies, but not the package that asked for them."""
    make_venv(environment)
    install_with_dependencies(environment)
    run(environment / "bin/python", "-m", "pip", "uninstall", "-qq", "--yes", "bytesplat-ns")


def make_layer(environment):
    """A virtual environment that sees the packages and commands of another one, and runs them as its own."""
    make_venv(VENV, "--clear", "--without-pip")
    # The prefix is for those that look for files by site.getsitepackages(), as the loader of NVRTC does.
    (VENV / SITE_PACKAGES / "dependencies.pth").write_text(
        f"import site; site.PREFIXES.append({str(environment)!r}); "
        f"site.addsitedir({str(environment / SITE_PACKAGES)!r})\n"
    )
    for command in (environment / "bin").iterdir():
        ours = VENV / "bin" / command.name
        if ours.exists():
            continue
        head = command.read_bytes()[:512]
        if head.startswith(b"#!") and os.fsencode(environment) in head:
            words = shlex.join([f"{VENV}/bin/python", str(command)])
            ours.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            ours.chmod(0o755)
        else:
            ours.symlink_to(command)


def make_venv(environment, *options):
    run(sys.executable, "-m", "venv", *options, environment)


def install_with_dependencies(environment):
    """This checkout and all it needs, in one command: with several, a later one undoes an earlier one's choice."""
    print(f"Installing the dependencies into {environment}: 8 GB, some minutes", flush=True)
    install(environment, "--constraint", CONSTRAINTS, "--editable", f"{ROOT}[dev]")


def install(environment, *arguments):
    quiet = "-qq", "--no-input", "--disable-pip-version-check", "--root-user-action=ignore"
    run(environment / "bin/python", "-m", "pip", "install", *quiet, *arguments)


def run(*command):
    done = subprocess.run([str(word) for word in command])
    if done.returncode:
        raise SystemExit(f"Failed: {shlex.join(done.args)}")


if __name__ == "__main__":
    main()
