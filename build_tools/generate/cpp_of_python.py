"""C++ of what flash_attn_cuda/call/fields.py and flash_attn_cuda/call/rules.py say of a call in
Python.

An expression is made of `call`, or `self`, its fields, their sizes and dtypes, None, the call's own
functions, functions of tensors and numbers that C++ has by the same name, numbers, comparisons and
arithmetic.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

OPERATORS: dict[type[ast.AST], str] = {
    **{ast.And: "&&", ast.Or: "||", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Mod: "%"},
    **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
}
ATTRIBUTES = {"shape": "sizes()", "dtype": "scalar_type()"}
IN_CPP = {"E4M3": "at::kFloat8_e4m3fn", "E8M0": "at::kFloat8_e8m0fnu"}


class Translator:
    """functions: what C++ calls those of a call. types: of its fields. constants: of the module."""

    def __init__(
        self,
        functions: Mapping[str, str],
        types: Mapping[str, str],
        constants: Mapping[str, object],
    ) -> None:
        self.functions, self.types, self.constants = functions, types, constants

    def __call__(self, node: ast.expr) -> str:
        match node:
            case ast.BoolOp(op, values):
                return "(" + f" {OPERATORS[type(op)]} ".join(map(self, values)) + ")"
            case ast.UnaryOp(ast.Not(), x):
                return f"!{self(x)}"
            case ast.Compare(x, [ast.Is() | ast.IsNot() as op], [ast.Constant(None)]):
                return self._given(x, "" if isinstance(op, ast.IsNot) else "!")
            case ast.Compare(left, ops, others):
                sides = [left, *others]
                pairs = [
                    f"{self(x)} {OPERATORS[type(op)]} {self(y)}"
                    for x, op, y in zip(sides, ops, others, strict=False)
                ]
                return "(" + " && ".join(pairs) + ")"
            case ast.BinOp(x, op, y):
                return f"({self(x)} {OPERATORS[type(op)]} {self(y)})"
            case ast.IfExp(test, x, y):
                return f"({self(test)} ? {self(x)} : {self(y)})"
            case ast.Call(ast.Attribute(ast.Name(), name), []):
                return f"{self.functions[name]}(call)"
            case ast.Call(ast.Attribute(x, "dim"), []):
                return f"{self(x)}.dim()"
            case ast.Call(ast.Name(name), arguments):
                return f"{name}({', '.join(map(self, arguments))})"
            case ast.Subscript(ast.Attribute(x, "shape"), ast.Slice(None, ast.UnaryOp())):
                return f"{self(x)}.sizes().slice(0, {self(x)}.dim() - 1)"  # [:-1]
            case ast.Subscript(ast.Attribute(x, "shape"), index):
                return f"{self(x)}.size({ast.literal_eval(index)})"
            case ast.Attribute(ast.Name(), name):
                return f"call.{name}"
            case ast.Attribute(x, name):
                return f"{self(x)}.{ATTRIBUTES[name]}"
            case ast.Name(name):
                return IN_CPP.get(name) or str(self.constants[name])
            case ast.Constant(value):
                return str(value)
        raise NotImplementedError(f"no C++ of {ast.unparse(node)}")

    def _given(self, x: ast.expr, sign: str) -> str:
        assert isinstance(x, ast.Attribute), ast.unparse(x)
        function = "defined" if self.types[x.attr].startswith("Tensor") else "has_value"
        return f"{sign}call.{x.attr}.{function}()"
