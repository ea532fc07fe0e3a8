"""Writes the extension's checks of what both sides check alike: C++ functions of the tables and
layouts of flash_attn_cuda/call/rules.py, and of the arrays whose shape and dtype, and the numbers
whose range, flash_attn_cuda/call/fields.py declares. The build of the extension calls it.

python -m build_tools.generate.call_rules   # prints it
"""

from __future__ import annotations

import ast
import itertools
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from build_tools.compile.jobs import write_if_changed
from build_tools.compile.toolchain import REPO
from build_tools.generate.call_structs import FUNCTIONS, Field, descriptions, translator

HEADER = "torch_binding/generated_rules.h"  # as sources include it
SOURCE = REPO / "flash_attn_cuda/call/rules.py"
TABLES = runpy.run_path(str(SOURCE))  # without the package, and torch

# What is told of a call, and what comes with it: class, parameter.
CALL, INCOMING, TANGENTS = (
    ("AttentionCall", "call"),
    ("Incoming", "incoming"),
    ("Tangents", "tangents"),
)
# Function, its tables, and what it is told beside the call.
RULES = {
    "check_rules_of_call": (("OF_CALL",), CALL),
    "check_rules_of_backward": (("OF_BACKWARD",), CALL),
    "check_rules_of_recorded": (("OF_RECORDED", "OF_LISTS"), CALL),
    "check_rules_of_direction": (("OF_DIRECTION",), CALL),
    "check_rules_of_incoming": (("OF_INCOMING",), INCOMING),
    "check_rules_of_tangents": (("OF_TANGENTS",), TANGENTS),
}
# Of sizes and dtypes.
MUSTS = {
    "check_tensors": ("OF_TENSORS", "OF_VALUES"),
    "check_e4m3_tensors": ("OF_E4M3",),
    "check_cuda_tensors": ("OF_CUDA",),
    "check_bounds": ("OF_BOUNDS",),
    "check_batch": ("OF_BATCH",),
    "check_sizes_of_arrays": ("OF_ARRAYS",),
    "check_sizes_of_pairs": ("OF_PAIRS",),
}
CHECKS = {ValueError: "TORCH_CHECK_VALUE", TypeError: "TORCH_CHECK_TYPE"}
# In words: the name of an argument, function or field, what of a tensor, and of a shape.
PLACE = r"\{(\w+)(?:\.(shape|dtype|strides|value)(?:\[(\d|:-1)\])?)?\}"
# Of a tensor, in words.
WHAT = {"shape": "sizes()", "dtype": "scalar_type()", "strides": "strides()"}
# Of a field's type: whether it is set, what it must be where it must not, and what it is then.
SET = {
    "Tensor | None": ("{}.defined()", '"None"', '"a tensor"'),
    "int | None": ("{}.has_value()", '"None"', "{}.value_or(0)"),
    "float": ("({} > 0.0)", '"0"', "{}"),
    "float | None": ("{}.has_value()", '"None"', "{}.value_or(0.0)"),
    "bool": ("{}", '"False"', '"True"'),
}
DTYPES = {
    "int32": "at::kInt",
    "int64": "at::kLong",
    "int8": "at::kChar",
    "fp32": "at::kFloat",
    "e8m0": "at::kFloat8_e8m0fnu",
    "bool": "at::kBool",
    "lse": "at::kFloat",
    "q": "dtype_in_16_bits(call)",
    "new": "dtype_of_new_keys(call)",
    "bias": "call.bias.scalar_type()",
}
MORE = ("false", "false", "or_more", "or_more")  # dimensions over pairs that may be larger
# Of a number's range: signs, and what holds of a value.
BOUNDS = {"at_least": ">=", "at_most": "<=", "below": "<"}
IN_FLOAT32 = {
    "finite": "std::isfinite(static_cast<float>({0}))",
    "normal": "{0} <= 0.0 || std::isnormal(static_cast<float>({0}))",
    "": "",
}


class Writer:
    """The C++ of rules of a call and, maybe, what comes with it."""

    def __init__(self, described: dict[str, list[Field]], told: tuple[str, str]) -> None:
        self.places = {x.name: (x, place) for name, place in (CALL, told) for x in described[name]}

    def value(self, name: str) -> tuple[str, str, str]:
        """As SET says, of a field, or of a function of the call."""
        if name not in self.places:
            condition = must = got = f"{FUNCTIONS[name]}(call)"
        else:
            field, place = self.places[name]
            condition, must, got = (x.format(f"{place}.{name}") for x in SET[field.type])
        if known := TABLES["KNOWN"].get(name):
            must, got = f'"{known.absent}"', f'"{known.given}"'
        return condition, must, got

    def name(self, name: str) -> str:
        if name in TABLES["KNOWN"]:
            return f'"{TABLES["KNOWN"][name].name}"'
        is_renamed = name in self.places and self.places[name][0].is_renamed
        return f"names.{name}" if is_renamed else f'"{name}"'

    def fact(self, name: str) -> str:
        condition, *_ = self.value(name.removeprefix("not "))
        return f"!{condition}" if name.startswith("not ") else condition

    def words(self, text: str) -> str:
        """An error's words, as arguments of one of torch's checks."""
        parts, end = [], 0
        for place in re.finditer(PLACE, text):
            parts += [f'"{text[end : place.start()]}"', self.told(*place.groups())]
            end = place.end()
        parts.append(f'"{text[end:]}"')
        return ", ".join(x for x in parts if x != '""')

    def told(self, name: str, what: str | None, index: str | None) -> str:
        if what is None:
            return f"{FUNCTIONS[name]}(call)" if name in FUNCTIONS else self.name(name)
        if what == "value":
            return f"call.{name}"
        if index == ":-1":
            return f"in_python(call.{name}.sizes().slice(0, call.{name}.dim() - 1))"
        if index is not None:
            return f"call.{name}.size({index})"
        return f"in_python(call.{name}.{WHAT[what]})"

    def must(self, must: Any, holds: str) -> Iterator[str]:
        where = f"!{self.fact(must.where)} || " if must.where else ""
        said = f"{self.name(must.argument)}, {self.words(': ' + must.words)}"
        yield f"  {CHECKS[must.kind]}({where}{holds}, {said});"

    def rules(self, rules: Any) -> Iterator[str]:
        fact = self.fact(rules.fact)
        if rules.refusal:
            yield f"  TORCH_CHECK_NOT_IMPLEMENTED(!{fact}, {self.words(rules.refusal)});"
            return
        yield f"  if ({fact}) {{"
        yield f"    const Where where{{{self.words(rules.where)}}};"
        for check, names in (("require(!", rules.absent), ("refuse(", rules.refused)):
            for name in names:
                condition, must, got = self.value(name)
                yield f"    {check}{condition}, {self.name(name)}, {must}, where, {got});"
        for name in rules.given:
            condition, *_ = self.value(name)
            yield f'    require({condition}, {self.name(name)}, "given", where, "None");'
        yield "  }"


def musts(table: str, writer: Writer) -> Iterator[str]:
    """The checks of a table of Must, whose conditions are read off the source."""
    (made,) = (
        x.value
        for x in ast.parse(SOURCE.read_text()).body
        if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == table
    )
    assert isinstance(made, ast.Tuple)
    translate = translator(TABLES)
    for must, written in zip(TABLES[table], made.elts, strict=True):
        assert isinstance(written, ast.Call) and isinstance(written.args[1], ast.Lambda)
        yield from writer.must(must, translate(written.args[1].body))


def layouts(writer: Writer) -> Iterator[str]:
    """Of q, k and v: as many dimensions as the layout of the first fact that holds."""
    for name, choices in TABLES["LAYOUTS"].items():
        for place, (fact, layout) in enumerate(choices):
            condition = f"if ({writer.fact(fact)}) " if fact else ""
            given = f"{writer.name(name)}, call.{name}, {layout.count(',') + 1}"
            yield f'  {"else " if place else ""}{condition}check_dims({given}, "{layout}");'


def function(name: str, told: tuple[str, str], body: Iterator[str]) -> Iterator[str]:
    parameters = ", ".join(f"const {x}& {place}" for x, place in dict((CALL, told)).items())
    yield f"inline void {name}({parameters},"
    yield "    [[maybe_unused]] const ArgumentNames& names) {"
    yield from body
    yield "}"
    yield ""


def ranges(fields: list[Field], writer: Writer) -> Iterator[str]:
    for x in fields:
        value = f"call.{x.name}" + (".value_or(0.0)" if "None" in x.type else "")
        bounds = (f"{value} {BOUNDS[name]} {x.said[name]}" for name in BOUNDS if name in x.said)
        holds = IN_FLOAT32[x.said.get("in_float32", "")].format(value) or " && ".join(bounds)
        if holds:
            must = TABLES["range_in_words"](x.said)
            yield f'  require({holds}, {writer.name(x.name)}, "{must}", {value});'


def arrays_of_call(fields: list[Field], writer: Writer) -> Iterator[str]:
    yield "  const at::Tensor& q = call.q;"
    yield "  const std::int64_t B = batch_of(call);"
    yield "  const std::int64_t Hq = heads_q_of(call);"
    yield "  const std::int64_t Hk = heads_k_of(call);"
    yield "  const at::IntArrayRef tokens = tokens_in_place(call);"
    yield "  const at::DimVector groups = groups_in_place(call);"
    for x in fields:
        if (shape := x.said.get("shape")) and not x.said.get("over_pairs"):
            sizes = re.sub(r"\((.*?),?\)", r"{\1}", shape).replace(" |", ",")
            given = f"{writer.name(x.name)}, call.{x.name}"
            dtype = dtypes_of(x)
            check = "array"
            if is_strided := x.said.get("is_strided"):
                check, sizes, dtype = "strided", f"{{{sizes}}}", f"{{{dtype}}}"
            yield f"  if (call.{x.name}.defined())"
            if shape != "...":
                yield f"    check_{check}({given}, {sizes}, {dtype}, q);"
            elif is_strided:
                yield f"    check_place({given}, {dtype}, q);"
            else:
                yield f"    check_array({given}, call.{x.name}.sizes(), {dtype}, q);"


def dtypes_of(field: Field) -> str:
    """Those that an array may have."""
    return ", ".join(DTYPES[each] for each in field.said.get("dtype", "int32").split(" or "))


def arrays_over_pairs(fields: list[Field]) -> Iterator[str]:
    yield "  const auto [B, Hq, Sq, Sk, Tq, Tk, or_more] = extent_of(call);"
    for x in fields:
        if x.said.get("over_pairs"):
            for shape, fact in shapes_over_pairs(x.said):
                yield f"  if (call.{x.name}.defined(){fact})"
                given = f'"{x.name}", call.{x.name}, {{{sizes_over_pairs(shape)}}}'
                yield f"    check_over_pairs({given}, {{{dtypes_of(x)}}}, call.q);"


def shapes_over_pairs(said: dict[str, Any]) -> list[tuple[str, str]]:
    """Each with the fact that makes it the one, behind " && "."""
    if not (by_distance := said.get("by_distance")):
        return [(said["shape"], "")]
    fact = "call.bias_by_distance"
    return [(said["shape"], f" && !{fact}"), (by_distance, f" && {fact}")]


def sizes_over_pairs(shape: str) -> str:
    names = shape.strip("()").split(", ")
    return ", ".join(size_rule(*each) for each in zip(names, MORE, strict=True))


def size_rule(name: str, or_more: str) -> str:
    """Of "Sq?": {Sq, true, or_more}."""
    if name.isdecimal():
        return f"{{{name}, false, false}}"
    or_one = str(name.endswith("?")).lower()
    return f"{{{name.rstrip('?')}, {or_one}, {or_more}}}"


def arrays_like(fields: list[Field], place: str) -> Iterator[str]:
    """Of what comes into a backward, or tangents; OutputTensor checks what is written."""
    yield "  const at::DimVector out = output_sizes(call);"
    yield "  const at::DimVector lse = lse_sizes(call);"
    for x in fields:
        shape, dtype = x.said.get("shape", ""), x.said.get("dtype", "")
        if not shape or x.said.get("part") == "target":
            continue
        value, sizes = f"{place}.{x.name}", shape if shape in ("out", "lse") else f"call.{shape}"
        is_known = f" && {value}.numel() > 0" if dtype == "int8" else ""
        if not x.is_required:
            yield f"  if ({value}.defined(){is_known})"
        indent = "  " if x.is_required else "    "
        sizes += ".sizes()" if sizes.startswith("call") else ""
        yield f'{indent}check_like("{x.name}", {value}, {sizes}, {DTYPES[dtype]}, call.q);'


def lines() -> Iterator[str]:
    described = descriptions()
    yield "// Made of flash_attn_cuda/call/rules.py and flash_attn_cuda/call/fields.py by"
    yield "// build_tools/generate/call_rules.py."
    yield "#pragma once"
    yield ""
    yield "#include <cmath>"
    yield ""
    yield '#include "torch_binding/check.h"'
    yield '#include "torch_binding/layout.h"'
    yield '#include "torch_binding/over_pairs.h"'
    yield '#include "torch_binding/to_params.h"'
    yield ""
    yield "namespace flash_attn_cuda::binding {"
    yield ""
    for name, (tables, told) in RULES.items():
        writer = Writer(described, told)
        made = (line for table in tables for x in TABLES[table] for line in writer.rules(x))
        yield from function(name, told, made)
    of_call = Writer(described, CALL)
    for name, chosen in MUSTS.items():
        first = layouts(of_call) if name == "check_tensors" else iter(())
        made = (line for table in chosen for line in musts(table, of_call))
        yield from function(name, CALL, itertools.chain(first, made))
    numbers = ranges(described[CALL[0]], of_call)
    yield from function("check_numbers", CALL, numbers)
    arrays = arrays_of_call(described[CALL[0]], of_call)
    yield from function("check_arrays", CALL, arrays)
    yield from function("check_pairs", CALL, arrays_over_pairs(described[CALL[0]]))
    for told in (INCOMING, TANGENTS):
        body = arrays_like(described[told[0]], told[1])
        yield from function(f"check_arrays_of_{told[1]}", told, body)
    yield "}  // namespace flash_attn_cuda::binding"


def text() -> str:
    return "\n".join(lines()) + "\n"


def write(folder: Path) -> None:
    """Writes the header below ``folder``, which is to be searched for includes."""
    write_if_changed(folder / HEADER, text())


if __name__ == "__main__":
    sys.stdout.write(text())
