"""Everything static is in pyproject.toml; here the CPU kernels are compiled, where there is a compiler."""

import logging
import runpy
import warnings
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CPU = Path("qtorch", "kernels", "cpu")
# Run as a file: to import it would import torch, which an isolated build does not have.
BUILD = runpy.run_path(str(CPU / "build.py"))


class BuildKernels(build_ext):
    """Libraries that Python does not import (ctypes loads them), so one build serves every version of Python."""

    def run(self) -> None:
        # pip shows it with -v.
        say = lambda line: self.announce(f"qtorch: {line}", logging.INFO)  # noqa: E731
        # A wheel is for other machines too.
        sets = BUILD["needed"]() if self._in_place else ()
        errors = BUILD["build"](self._directory(), names=sets, say=say)
        for error in dict.fromkeys(errors.values()):
            names = ", ".join(name for name in errors if errors[name] == error)
            # Without them qtorch works, slower; it says so at first use.
            warnings.warn(f"the CPU kernels for {names} were not built: {error}", stacklevel=1)

    @property
    def _in_place(self) -> bool:
        return bool(self.inplace or getattr(self, "editable_mode", False))

    def _directory(self) -> Path:
        return CPU / "lib" if self._in_place else Path(self.build_lib) / CPU / "lib"

    def get_outputs(self) -> list[str]:
        return [str(path) for path in sorted(self._directory().glob("*.so"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return []


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class WithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(distclass=WithKernels, cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel})
