"""Writes the extension's checks of what both sides check alike: a C++ function for each table of
flash_attn_cuda/rules.py, and for the arrays whose shape and dtype flash_attn_cuda/call.py declares.
The build of the extension calls it.

python -m build_tools.generate_rules   # prints it
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from build_tools.generate_call import Field, descriptions
from build_tools.generate_units import write_if_changed
from build_tools.toolchain import REPO

HEADER = "torch_binding/generated_rules.h"  # as sources include it
TABLES = runpy.run_path(str(REPO / "flash_attn_cuda/rules.py"))  # without the package, and torch

PARAMETERS = {"AttentionCall": "call", "Incoming": "incoming", "Tangents": "tangents"}
# Function, its tables, and what it is told.
FUNCTIONS = {
    "check_rules_of_call": (("OF_CALL",), ("AttentionCall",)),
    "check_rules_of_backward": (("OF_BACKWARD", "OF_DETERMINISTIC"), ("AttentionCall",)),
    "check_rules_of_direction": (("OF_DIRECTION",), ("AttentionCall",)),
    "check_rules_of_incoming": (("OF_INCOMING",), ("AttentionCall", "Incoming")),
    "check_rules_of_tangents": (("OF_TANGENTS",), ("AttentionCall", "Tangents")),
}
DTYPES = {
    "int32": "at::kInt",
    "int64": "at::kLong",
    "int8": "at::kChar",
    "fp32": "at::kFloat",
    "lse": "at::kFloat",
    "q": "call.q.scalar_type()",
    "bias": "call.bias.scalar_type()",
}

Described = dict[str, list[Field]]


class Writer:
    """The C++ of rules, over these classes."""

    def __init__(self, described: Described, told: tuple[str, ...]) -> None:
        self.places = {x.name: PARAMETERS[name] for name in told for x in described[name]}
        self.renamed = renamed(described)

    def value(self, name: str) -> str:
        """A field, or a function of the call."""
        return f"{self.places[name]}.{name}" if name in self.places else f"{name}(call)"

    def argument(self, name: str) -> str:
        """(name in errors, value)"""
        if known := TABLES["KNOWN"].get(name):
            value = f'Known{{{self.value(name)}, "{known.absent}", "{known.given}"}}'
            return f'"{known.name}", {value}'
        shown = f"names.{name}" if name in self.renamed else f'"{name}"'
        return f"{shown}, {self.value(name)}"

    def fact(self, fact: str) -> str:
        name = fact.removeprefix("not ")
        value = f"is_set({self.value(name)})" if name in self.places else self.value(name)
        return value if name == fact else f"!{value}"

    def rules(self, rules: Any) -> Iterator[str]:
        if rules.refusal:
            yield f"  if ({self.fact(rules.fact)})"
            yield f"    raise_refused({words(rules.refusal)});"
            return
        yield f"  if ({self.fact(rules.fact)}) {{"
        yield f"    const Where where{{{words(rules.where)}}};"
        for check, names in (
            ("check_absent", rules.absent),
            ("check_refused", rules.refused),
            ("check_given", rules.given),
        ):
            yield from (f"    {check}({self.argument(name)}, where);" for name in names)
        yield "  }"


def renamed(described: Described) -> set[str]:
    """Members of ArgumentNames."""
    return {"dropout_p"} | {x.name for x in described["AttentionCall"] if "name_of_cache" in x.said}


def words(text: str) -> str:
    """A string with a name in it, {k}, as the strings and names that it consists of."""
    parts = re.split(r"\{(\w+)\}", text)
    strings = (f'"{x}"' if i % 2 == 0 else f"names.{x}" for i, x in enumerate(parts) if x)
    return ", ".join(strings if parts[0] else ('""', *strings))


def function(name: str, told: tuple[str, ...], body: Iterator[str]) -> Iterator[str]:
    parameters = "".join(f"const {x}& {PARAMETERS[x]}, " for x in told)
    yield f"inline void {name}({parameters}"
    yield "    [[maybe_unused]] const ArgumentNames& names) {"
    yield from body
    yield "}"
    yield ""


def rules_of(tables: tuple[str, ...], writer: Writer) -> Iterator[str]:
    for table in tables:
        for rules in TABLES[table]:
            yield from writer.rules(rules)


def arrays_of_call(fields: list[Field], writer: Writer) -> Iterator[str]:
    yield "  const at::Tensor& q = call.q;"
    yield "  const std::int64_t B = batch_of(call);"
    yield "  const std::int64_t Hq = q.size(q.dim() - 2);"
    yield "  const std::int64_t Hk = call.k.size(call.k.dim() - 2);"
    yield "  const at::IntArrayRef tokens = tokens_in_place(call);"
    for x in fields:
        if "shape" not in x.said:
            continue
        shapes = [s.strip() for s in x.said["shape"].split("|")]
        sizes = [re.sub(r"\((.*?),?\)", r"{\1}", shape) for shape in shapes]
        check, size = ("check_array", sizes[0])
        if x.said.get("is_strided"):
            check, size = "check_strided", f"{{{', '.join(sizes)}}}"
        dtype = DTYPES[x.said.get("dtype", "int32")]
        yield f"  if (call.{x.name}.defined())"
        yield f"    {check}({writer.argument(x.name)}, {size}, {dtype}, q);"


def arrays_like(name: str, fields: list[Field]) -> Iterator[str]:
    """Of what comes into a backward, or tangents; OutputTensor checks what is written."""
    arrays = [x for x in fields if x.said.get("shape") and x.said.get("part") != "target"]
    yield "  const at::DimVector out = output_sizes(call);"
    yield "  const at::DimVector lse = lse_sizes(call);"
    for x in arrays:
        value, shape, dtype = f"{PARAMETERS[name]}.{x.name}", x.said["shape"], x.said["dtype"]
        sizes = shape if shape in ("out", "lse") else f"call.{shape}.sizes()"
        if not x.is_required:
            is_known = f" && {value}.numel() > 0" if dtype == "int8" else ""
            yield f"  if ({value}.defined(){is_known})"
        indent = "  " if x.is_required else "    "
        yield f'{indent}check_like("{x.name}", {value}, {sizes}, {DTYPES[dtype]}, call.q);'


def lines() -> Iterator[str]:
    described = descriptions()
    yield "// Made of flash_attn_cuda/rules.py and flash_attn_cuda/call.py by"
    yield "// build_tools/generate_rules.py."
    yield "#pragma once"
    yield ""
    yield '#include "torch_binding/check.h"'
    yield '#include "torch_binding/to_params.h"'
    yield ""
    yield "namespace flash_attn_cuda::binding {"
    yield ""
    yield "// -- what goes together"
    yield ""
    for name, (tables, told) in FUNCTIONS.items():
        yield from function(name, told, rules_of(tables, Writer(described, told)))
    yield "// -- shapes and dtypes"
    yield ""
    told = ("AttentionCall",)
    writer = Writer(described, told)
    yield from function("check_arrays", told, arrays_of_call(described[told[0]], writer))
    for name in ("Incoming", "Tangents"):
        body = arrays_like(name, described[name])
        yield from function(f"check_arrays_of_{PARAMETERS[name]}", (*told, name), body)
    yield "}  // namespace flash_attn_cuda::binding"


def text() -> str:
    return "\n".join(lines()) + "\n"


def write(folder: Path) -> None:
    """Writes the header below ``folder``, which is to be searched for includes."""
    write_if_changed(folder / HEADER, text())


if __name__ == "__main__":
    sys.stdout.write(text())
