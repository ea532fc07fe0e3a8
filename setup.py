"""Installs flash_attn_cuda, with the extension where build_tools can build it."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# A PEP 517 front end does not put the project on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_tools import build_extension
from build_tools.build_extension import Backend


class BuildWithNinja(build_ext):
    """Hands the one extension to build_tools, which compiles with ninja and ccache."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build_extension.build(), target)


choice = build_extension.choose_backend()
print(build_extension.announcement(choice), file=sys.stderr)
extensions = [Extension("flash_attn_cuda._C", sources=[])] if choice.backend is Backend.cuda else []

setup(ext_modules=extensions, cmdclass={"build_ext": BuildWithNinja})
