"""Installs flash_attn_cuda, with the extension where build_tools can build it."""

import functools
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info
from setuptools.errors import SetupError

# An older one does not read pyproject.toml's licence. Some have no bdist_wheel either.
if [int(number) for number in re.findall(r"\d+", setuptools.__version__)] < [77, 0, 3]:
    sys.exit(
        "error: flash_attn_cuda builds with setuptools 77.0.3 or newer, not "
        f"{setuptools.__version__}: pip install 'setuptools>=77.0.3' 'ninja>=1.11', or build with "
        "isolation"
    )
from setuptools.command.bdist_wheel import bdist_wheel

# A PEP 517 front end does not put the project on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_tools import build_extension
from build_tools.build_extension import Backend, Choice
from build_tools.compile import torch_versions

EXTENSION = Extension("flash_attn_cuda._C", sources=[])


@contextmanager
def errors_of_setuptools() -> Iterator[None]:
    """Turns errors into those that setuptools shows in a line instead of a traceback."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        raise SetupError(str(error)) from error


@functools.cache
def choice() -> Choice:
    """What gets built; asked no earlier, as an sdist needs neither torch nor nvcc."""
    with errors_of_setuptools():
        chosen = build_extension.choose_backend()
    print(build_extension.announcement(chosen), file=sys.stderr)
    return chosen


class BuildWithNinja(build_ext):
    """Hands the one extension to build_tools, which compiles with ninja and ccache."""

    def run(self) -> None:
        # In the folder of the build, or for an editable install in the source tree.
        target = Path(self.get_ext_fullpath(EXTENSION.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if choice().backend is Backend.cpu:
            # One of an earlier build would be installed, or imported, all the same.
            target.unlink(missing_ok=True)
            self.extensions = self.distribution.ext_modules = []
        super().run()
        build_extension.record_choice(choice(), target.parent)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        with errors_of_setuptools():
            shutil.copy2(build_extension.build(choice().backend), target)


class ForOneTorch:
    """A command that leaves metadata of a wheel, which names the torch of its extension.

    The metadata that a front end asks for first must be that of the wheel it then gets.
    """

    def finalize_options(self) -> None:
        if choice().backend is not Backend.cpu:
            with errors_of_setuptools():
                torch = torch_versions.present_torch()
                if torch_versions.bind_to_torch(self.distribution, torch):
                    self.reinitialize_command("egg_info")  # an sdist of this run has the plain name
        super().finalize_options()


class Metadata(ForOneTorch, dist_info):
    """Also of an editable install."""


class Wheel(ForOneTorch, bdist_wheel):
    """A wheel for every platform where it has no extension."""

    def run(self) -> None:
        self.root_is_pure = choice().backend is Backend.cpu
        super().run()


setup(
    install_requires=[torch_versions.requirement()],
    ext_modules=[EXTENSION],
    cmdclass={"build_ext": BuildWithNinja, "dist_info": Metadata, "bdist_wheel": Wheel},
)
