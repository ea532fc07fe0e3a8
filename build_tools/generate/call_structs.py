"""Writes the extension's form of flash_attn_cuda/call/fields.py: a C++ struct for each of its
dataclasses, functions over the fields that the declarations speak of, what follows from a call's
fields, and a bound that checks of both sides have. What is checked of them, call_rules.py makes.
The build of the extension calls it.

python -m build_tools.generate.call_structs   # prints it
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_tools.compile.jobs import write_if_changed
from build_tools.compile.toolchain import REPO
from build_tools.generate.cpp_of_python import Translator

SOURCE = REPO / "flash_attn_cuda/call/fields.py"
HEADER = "torch_binding/generated_call.h"  # as sources include it
BOUNDS = {"MAX_HEAD_DIM": REPO / "flash_attn_cuda/call/rules.py"}

# A tensor that is None is undefined; other optional values say whether they are there.
CPP_TYPES = {
    "Tensor": "at::Tensor",
    "Tensor | None": "at::Tensor",
    "float": "double",
    "float | None": "std::optional<double>",
    "int": "std::int64_t",
    "int | None": "std::optional<std::int64_t>",
    "bool": "bool",
}
DESCRIBED = ("AttentionCall", "Incoming", "Tangents", "Results", "Gradients")
KEPT = ""  # the part of a call that its backward is told
# Those that operators of derivatives have no argument for.
NOT_OF_BACKWARD = ("append", "out")
# What errors of FlashAttention-2's functions call otherwise.
RENAMED = ("dropout_p",)


@dataclass(frozen=True)
class Field:
    """A field of a dataclass or NamedTuple; `said` is what its argument(...) says."""

    name: str
    type: str
    default: Any
    said: dict[str, Any]

    @property
    def is_required(self) -> bool:
        return self.type == "Tensor"

    @property
    def is_renamed(self) -> bool:
        """Whether errors of some road call it otherwise."""
        return "name_of_cache" in self.said or self.name in RENAMED

    @property
    def declaration(self) -> str:
        # True and False are true and false, numbers the same in both.
        value = "" if self.default is None else f" = {str(self.default).lower()}"
        return f"  {CPP_TYPES[self.type]} {self.name}{value};"


def fields_of(name: str, tree: ast.Module) -> list[Field]:
    """The annotated fields of a class."""
    (found,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name)
    made = []
    for each in found.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        default, said = None, {}
        if isinstance(each.value, ast.Call):  # argument(...)
            default = ast.literal_eval(each.value.args[0]) if each.value.args else None
            said = {str(x.arg): ast.literal_eval(x.value) for x in each.value.keywords}
        elif each.value is not None:
            default = ast.literal_eval(each.value)
        made.append(Field(each.target.id, ast.unparse(each.annotation), default, said))
    return made


def bound(name: str, source: Path) -> str:
    """A constant of a Python module."""
    (value,) = (
        ast.literal_eval(x.value)
        for x in ast.parse(source.read_text()).body
        if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == name
    )
    return f"inline constexpr std::int64_t {name.lower()} = {value};"


def struct(name: str, fields: list[Field]) -> Iterator[str]:
    yield f"struct {name} {{"
    yield from (x.declaration for x in fields)
    yield "};"
    yield ""


def visit_fields(name: str, fields: list[Field]) -> Iterator[str]:
    """A function that hands all fields to a visitor, in order."""
    yield "template <class Visitor>"
    yield f"void visit_fields({name}& described, Visitor&& visitor) {{"
    for x in fields:
        yield f'  visitor("{x.name}", described.{x.name}, {str(x.is_required).lower()});'
    yield "}"
    yield ""


def handles(name: str, namespace: str, fields: list[Field]) -> Iterator[str]:
    """Constants that each are a field and its name."""
    yield f"namespace {namespace} {{"
    for x in fields:
        kind = f"Field<{name}, {CPP_TYPES[x.type]}>"
        yield f'inline constexpr {kind} {x.name}{{"{x.name}", &{name}::{x.name}}};'
    yield f"}}  // namespace {namespace}"
    yield ""


def methods() -> dict[str, tuple[str, ast.expr]]:
    """The type and the expression of an AttentionCall's methods that are one."""
    (call,) = (
        x
        for x in ast.parse(SOURCE.read_text()).body
        if isinstance(x, ast.ClassDef) and x.name == "AttentionCall"
    )
    found = {}
    for each in call.body:
        if isinstance(each, ast.FunctionDef) and isinstance(each.returns, ast.Name):
            *before, last = each.body
            is_one = all(isinstance(x, ast.Expr) for x in before)  # the docstring
            if is_one and isinstance(last, ast.Return) and each.returns.id in ("bool", "int"):
                assert last.value is not None
                found[each.name] = each.returns.id, last.value
    return found


METHODS = methods()
# What C++ calls them: functions of numbers leave the name to variables.
FUNCTIONS = {name: name if type == "bool" else f"{name}_of" for name, (type, _) in METHODS.items()}


def translator(constants: Mapping[str, object]) -> Translator:
    types = {x.name: x.type for x in descriptions()["AttentionCall"]}
    return Translator(FUNCTIONS, types, constants)


def functions() -> Iterator[str]:
    translate = translator({})
    made = {
        f"inline {CPP_TYPES[type]} {FUNCTIONS[name]}(const AttentionCall& call)": expression
        for name, (type, expression) in METHODS.items()
    }
    yield from (f"{head};" for head in made)
    for head, expression in made.items():
        yield f"{head} {{ return {translate(expression)}; }}"
    yield ""


def visit_kept(fields: list[Field]) -> Iterator[str]:
    yield "// What autograd keeps of a call for its backward, which has no other part."
    yield "template <class Call, class Visitor>"
    yield "void visit_kept(Call&& call, Visitor&& visitor) {"
    yield from (f"  visitor(call.{x.name});" for x in fields if x.said.get("part", "") == KEPT)
    yield "}"
    yield ""


def visit_operator_arguments(call: list[Field], incoming: list[Field]) -> Iterator[str]:
    yield "// The arguments of operator attention_gradients, in order."
    yield "template <class Visitor>"
    yield "void visit_operator_arguments(const AttentionCall& call, const Incoming& incoming,"
    yield "                              Visitor&& visitor) {"
    for x in call:
        if x.said.get("part", "") not in NOT_OF_BACKWARD and x.name != "rng_state":
            yield f"  visitor(call.{x.name});"
    yield from (f"  visitor(incoming.{x.name});" for x in incoming if not x.said.get("part"))
    yield "}"
    yield ""


def visit_differentiable(fields: list[Field]) -> Iterator[str]:
    yield "// Inputs that have a gradient: visitor(name, input, gradient)."
    yield "template <class Visitor>"
    yield "void visit_differentiable(const AttentionCall& call, const Gradients& found,"
    yield "                          Visitor&& visitor) {"
    for x in fields:
        if x.said.get("has_gradient"):
            yield f'  visitor("{x.name}", call.{x.name}, found.d{x.name});'
    yield "}"
    yield ""


def argument_names(fields: list[Field]) -> Iterator[str]:
    named = {x.name: x.said["name_of_cache"] for x in fields if x.said.get("name_of_cache")}
    yield "// What errors call these arguments, where others call them by the field's name."
    yield "struct ArgumentNames {"
    yield from (f'  const char* {x.name} = "{x.name}";' for x in fields if x.is_renamed)
    yield "};"
    of_cache = ", ".join(f'.{name} = "{other}"' for name, other in named.items())
    yield "inline constexpr ArgumentNames names_of_fields{};"
    yield f"inline constexpr ArgumentNames names_of_cache{{{of_cache}}};"
    yield ""
    yield "inline const ArgumentNames& names_of(const AttentionCall& call) {"
    yield "  return call.over_cache ? names_of_cache : names_of_fields;"
    yield "}"
    yield ""


def descriptions() -> dict[str, list[Field]]:
    """The fields of each class of call/fields.py that the extension has as well."""
    tree = ast.parse(SOURCE.read_text())
    return {name: fields_of(name, tree) for name in DESCRIBED}


def lines(described: dict[str, list[Field]]) -> Iterator[str]:
    yield "// Made of flash_attn_cuda/call/fields.py, which says what each field is, by"
    yield "// build_tools/generate/call_structs.py."
    yield "#pragma once"
    yield ""
    yield "#include <ATen/core/Tensor.h>"
    yield ""
    yield "#include <cstdint>"
    yield "#include <initializer_list>"
    yield "#include <optional>"
    yield ""
    yield "namespace flash_attn_cuda::binding {"
    yield ""
    yield from (bound(name, source) for name, source in BOUNDS.items())
    yield ""
    for name, fields in described.items():
        yield from struct(name, fields)
    yield "// visitor(name, field, is_required)"
    for name, fields in described.items():
        yield from visit_fields(name, fields)
    yield "// A field of a description and its name."
    yield "template <class Described, class Type>"
    yield "struct Field {"
    yield "  using Value = Type;"
    yield "  const char* name;"
    yield "  Type Described::*place;"
    yield "};"
    yield ""
    call = described["AttentionCall"]
    yield from handles("AttentionCall", "fields_of_call", call)
    yield from handles("Incoming", "fields_of_incoming", described["Incoming"])
    yield from functions()
    yield from visit_kept(call)
    yield from visit_operator_arguments(call, described["Incoming"])
    yield from visit_differentiable(call)
    yield from argument_names(call)
    yield "}  // namespace flash_attn_cuda::binding"


def text() -> str:
    return "\n".join(lines(descriptions())) + "\n"


def write(folder: Path) -> None:
    """Writes the header below ``folder``, which is to be searched for includes."""
    write_if_changed(folder / HEADER, text())


if __name__ == "__main__":
    sys.stdout.write(text())
