"""Build steps that pyproject.toml cannot express: the kernel sources and the CPU libraries of the package.

`csrc/` lies beside the package in a checkout and is shipped inside it, as `bytesplat_ns/csrc`, in a wheel.
The CPU libraries are plain C behind ctypes: they need neither torch nor Python headers, so one wheel serves
every Python of a platform. Without a C++ compiler the installation succeeds, and the package renders with
its torch reference.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent.resolve()
LIBRARIES = Path("bytesplat_ns/ops")


# The package's own compiler driver. A stand-in for its parent keeps out `bytesplat_ns.ops`, which needs torch.
sys.modules["ops"] = ops = ModuleType("ops")
ops.__path__ = [str(ROOT / LIBRARIES)]
cpu_build = importlib.import_module("ops.cpu_build")


class BuildCpu(Command):
    """Compile the CPU libraries into the build tree, or into the checkout for an editable install."""

    user_options = ()
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None
        self.libraries = []

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        out_dir = (ROOT if self.editable_mode else Path(self.build_lib)) / LIBRARIES
        try:
            self.libraries = cpu_build.build(out_dir)
        except cpu_build.BuildError as error:
            print(f"bytesplat-ns: no CPU kernels, the slow torch reference takes their place: {error}")

    # setuptools asks every build step for these.
    def get_source_files(self):
        return []

    def get_outputs(self):
        return [str(library) for library in self.libraries]

    def get_output_mapping(self):
        return {}


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


build.sub_commands.append(("build_cpu", None))
setup(
    distclass=PlatformDistribution,
    cmdclass={"build_cpu": BuildCpu, "bdist_wheel": PlatformWheel},
    packages=[*find_packages(include=["bytesplat_ns*"]), "bytesplat_ns.csrc"],
    package_dir={"bytesplat_ns.csrc": "csrc"},
    package_data={"bytesplat_ns.csrc": ["*/*.h", "*/*.cpp", "*/*.cu"]},
)
