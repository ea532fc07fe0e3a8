"""Writes flash_attn_cuda/_C.pyi, which type checkers read in the extension's place, out of the
extension's sources: names and defaults of arguments are those of module.cpp, types those of the C++
declarations. FlashAttention-2's functions, which nothing here calls, take anything.

python -m build_tools.generate_stub           # writes it
python -m build_tools.generate_stub --check   # exits with status 1 where the file says otherwise
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from build_tools.toolchain import REPO

SOURCES = REPO / "csrc/torch_binding"
STUB = REPO / "flash_attn_cuda/_C.pyi"
LINE_LENGTH = 88  # of a signature on one line

HEADER = '''"""The compiled extension, whose documentation is in csrc/torch_binding/module.cpp.

Written by build_tools/generate_stub.py.
"""

from typing import Any

from torch import Tensor, dtype

from .call import AttentionCall, Gradients, Incoming, Results, Tangents

'''

# What pybind11, with torch's casters and python_arguments.h, makes of C++ types.
PYTHON_TYPES = {
    "at::Tensor": "Tensor",
    "void": "None",
    "at::ScalarType": "dtype",
    **{name: name for name in ("AttentionCall", "Incoming", "Tangents", "Results", "Gradients")},
    "std::string": "str",
    "char*": "str",
    "bool": "bool",
    "int": "int",
    "std::int64_t": "int",
    "double": "float",
    "pybind11::dict": "dict[str, Any]",
    "pybind11::tuple": "tuple[Any, ...]",
}
PYTHON_VALUES = {"py::none()": "None", "false": "False", "true": "True"}


@dataclass(frozen=True)
class Argument:
    name: str
    type: str
    default: str | None  # as Python writes it; None: there is none

    def __str__(self) -> str:
        default = "" if self.default is None else f" = {self.default}"
        return f"{self.name}: {self.type}{default}"


@dataclass(frozen=True)
class Function:
    name: str
    arguments: tuple[Argument, ...]
    returns: str

    def __str__(self) -> str:
        line = f"def {self.name}({', '.join(map(str, self.arguments))}) -> {self.returns}: ..."
        if len(line) <= LINE_LENGTH:
            return line
        inside = "".join(f"    {argument},\n" for argument in self.arguments)
        return f"def {self.name}(\n{inside}) -> {self.returns}: ..."


def definitions() -> dict[str, str]:
    """The text of each module.def, by the function's name."""
    text = (SOURCES / "module.cpp").read_text()
    found = re.findall(r'module\.def\(\s*"(\w+)",(.*?)\);\n', text, flags=re.DOTALL)
    if len(found) != text.count("module.def("):
        raise ValueError("module.cpp: not every module.def could be read")
    return dict(found)


def declarations() -> str:
    headers = (*sorted(SOURCES.glob("*.h")), REPO / "csrc/host/build_record.h")
    return "".join(path.read_text() for path in headers)


def python_type(cpp: str, aliases: dict[str, str]) -> str:
    """The stub's word for a C++ type."""
    plain = cpp.strip().removeprefix("const ").removesuffix("&")
    plain = " ".join(aliases.get(plain, plain).split())
    if plain in PYTHON_TYPES:
        return PYTHON_TYPES[plain]
    template = re.fullmatch(r"std::(optional|vector|tuple)<(.*)>", plain)
    if template is None:
        raise ValueError(f"{cpp}: no Python type is known for it")
    inside = [python_type(x, aliases) for x in template[2].split(",")]
    if template[1] == "optional":
        return f"{inside[0]} | None"
    return f"{'list' if template[1] == 'vector' else 'tuple'}[{', '.join(inside)}]"


def function_of(name: str, definition: str, declared: str) -> Function:
    """What a module.def defines; ValueError where its names are not those of the declaration."""
    aliases = dict(re.findall(r"using (\w+) = ([^;]+);", declared))
    bound = re.search(r"wrap_pybind_function(?:_no_gil)?\(&[\w:]*?(\w+)\)", definition)
    if bound is None:
        raise ValueError(f"{name}: binds no function")
    pattern = rf"^(\w[\w:<>, ]*[*&]?) {bound[1]}\(([^;]*)\);"
    found = re.findall(pattern, declared, flags=re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"{bound[1]}: is declared {len(found)} times")
    returns, parameters = found[0]
    split = [x.rpartition(" ") for x in " ".join(parameters.split()).split(", ") if x]
    named = re.findall(r'py::arg\("(\w+)"\)(?: = (py::none\(\)|[^,)]+))?', definition)
    # pybind11 gives the nth name to the nth parameter, whatever that is called.
    if [x for *_, x in split] != [x for x, _ in named]:
        raise ValueError(f"{name}: module.cpp's names are not those of its declaration")
    arguments = tuple(
        Argument(x, python_type(cpp, aliases), PYTHON_VALUES.get(value, value) if value else None)
        for (cpp, _, x), (_, value) in zip(split, named, strict=True)
    )
    return Function(name, arguments, python_type(returns, aliases))


def flash_attention_2() -> list[Function]:
    """The functions that flash_attn_2.cpp defines."""
    text = (SOURCES / "flash_attn_2.cpp").read_text()
    anything = (Argument("*arguments", "Any", None), Argument("**named", "Any", None))
    names = re.findall(r'define\(\s*module, "(\w+)"', text)
    return [Function(name, anything, "list[Tensor]") for name in names]


def functions() -> list[Function]:
    declared = declarations()
    own = [function_of(name, text, declared) for name, text in definitions().items()]
    return own + flash_attention_2()


def stub() -> str:
    return HEADER + "".join(f"{function}\n" for function in functions())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_tools.generate_stub",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args(arguments).check:
        STUB.write_text(stub())
    elif STUB.read_text() != stub():
        print(f"{STUB}: run python -m build_tools.generate_stub", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
