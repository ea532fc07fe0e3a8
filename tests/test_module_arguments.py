"""The functions of flash_attn_cuda._C as its sources have them: FlashAttention-2's arguments, which
callers pass by position, and the stub, _C.pyi, which type checkers read in the module's place.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from flash_attn_cuda import build_info

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc/torch_binding"
BINDINGS = (SOURCES / "module.cpp").read_text()
HEADERS = (*sorted(SOURCES.glob("*.h")), ROOT / "csrc/host/build_record.h")
DECLARATIONS = "".join(path.read_text() for path in HEADERS)
STUB = ROOT / "flash_attn_cuda/_C.pyi"

SCORES = "p_dropout softmax_scale"
MASK = "is_causal window_left window_right softcap"
FORWARD = "q k v out"
BACKWARD = "dout q k v out softmax_lse dq dk dv"
LENGTHS = "cu_seqlens_q cu_seqlens_k"
MOST = "max_seqlen_q max_seqlen_k"

# FlashAttention-2's order.
POSITIONAL = {
    "fwd": f"{FORWARD} alibi_slopes {SCORES} {MASK} return_softmax unused_generator",
    "varlen_fwd": (
        f"{FORWARD} {LENGTHS} seqused_k leftpad_k block_table alibi_slopes {MOST} {SCORES} "
        f"zero_tensors {MASK} return_softmax unused_generator num_splits"
    ),
    "bwd": f"{BACKWARD} alibi_slopes {SCORES} {MASK} deterministic unused_generator rng_state",
    "varlen_bwd": (
        f"{BACKWARD} {LENGTHS} alibi_slopes {MOST} {SCORES} zero_tensors {MASK} deterministic "
        "unused_generator rng_state"
    ),
    "fwd_kvcache": (
        "q kcache vcache k v seqlens_k rotary_cos rotary_sin cache_batch_idx leftpad_k "
        f"block_table alibi_slopes out softmax_scale {MASK} is_rotary_interleaved num_splits"
    ),
}


def definitions() -> dict[str, str]:
    """The text of each module.def, by the function's name."""
    found = re.findall(r'module\.def\(\s*"(\w+)",(.*?)\);\n', BINDINGS, flags=re.DOTALL)
    return dict(found)


def arguments(definition: str) -> list[tuple[str, bool]]:
    """(name, whether it has a default) of each argument."""
    return [(name, bool(rest)) for name, rest in re.findall(r'py::arg\("(\w+)"\)( =)?', definition)]


BOUND = [name for name, text in definitions().items() if arguments(text)]


@pytest.mark.parametrize("function", POSITIONAL)
def test_flash_attention_2s_order(function: str) -> None:
    """What is added stands behind it, and may be left out."""
    expected = POSITIONAL[function].split()
    given = arguments(definitions()[function])
    assert [name for name, _ in given[: len(expected)]] == expected
    assert all(has_default for _, has_default in given[len(expected) :])


@pytest.mark.parametrize("function", BOUND)
def test_names_are_those_of_the_declaration(function: str) -> None:
    """pybind11 gives the nth name to the nth parameter, whatever that is called."""
    definition = definitions()[function]
    names = [name for name, _ in arguments(definition)]
    declared = re.search(rf"[ >]{function}\(([^;]*)\);", DECLARATIONS)
    assert declared is not None
    assert re.findall(r"(\w+)(?:,|$)", declared[1].replace("\n", " ")) == names
    described = "".join(re.findall(r'"(.*?)(?:\\n)*"', definition.split("py::arg")[0]))
    is_described = described.startswith(f"{function}(")
    assert is_described or function not in POSITIONAL
    if is_described:
        listed = described[len(function) + 1 : described.index(")")].split(",")
        assert [name.split("=")[0].strip() for name in listed] == names


# -- the stub --------------------------------------------------------------------------------------

# What pybind11, with torch's casters, makes of C++ types, as the stub writes it.
PYTHON_TYPES = {
    "at::Tensor": "Tensor",
    "at::Generator": "Generator",
    "at::ScalarType": "dtype",
    "std::string": "str",
    "char*": "str",
    "bool": "bool",
    "int": "int",
    "std::int64_t": "int",
    "double": "float",
    "pybind11::dict": "dict[str, Any]",
}
ALIASES = dict(re.findall(r"using (\w+) = ([^;]+);", DECLARATIONS))


class Argument(NamedTuple):
    name: str
    default: str | None  # as Python writes it; None: there is none


class Signature(NamedTuple):
    arguments: list[Argument]
    types: list[str]
    returns: str


def signature_of(function: ast.FunctionDef) -> Signature:
    given = function.args
    assert not (given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg)
    defaults = [ast.unparse(x) for x in given.defaults]
    all_defaults = [*[None] * (len(given.args) - len(defaults)), *defaults]
    return Signature(
        [Argument(x.arg, y) for x, y in zip(given.args, all_defaults, strict=True)],
        ["" if x.annotation is None else ast.unparse(x.annotation) for x in given.args],
        "" if function.returns is None else ast.unparse(function.returns),
    )


def stub() -> dict[str, Signature]:
    """The functions of the stub: behind its docstring nothing else is there, and each once."""
    _, *body = ast.parse(STUB.read_text()).body
    assert all(isinstance(x, ast.FunctionDef | ast.ImportFrom) for x in body)
    functions = [x for x in body if isinstance(x, ast.FunctionDef)]
    signatures = {x.name: signature_of(x) for x in functions}
    assert len(signatures) == len(functions)
    return signatures


def bound_arguments(definition: str) -> list[Argument]:
    """The arguments of a module.def, defaults as Python writes them."""
    python = {"py::none()": "None", "false": "False", "true": "True"}
    found = re.findall(r'py::arg\("(\w+)"\)(?: = (py::none\(\)|[^,)]+))?', definition)
    return [Argument(x, python.get(value, value) if value else None) for x, value in found]


def declared(definition: str) -> tuple[list[str], str]:
    """(types of the parameters, type of the result) of the C++ function that a module.def binds."""
    bound = re.search(r"wrap_pybind_function(?:_no_gil)?\(&[\w:]*?(\w+)\)", definition)
    assert bound is not None
    pattern = rf"^(\w[\w:<>, ]*[*&]?) {bound[1]}\(([^;]*)\);"
    found = re.findall(pattern, DECLARATIONS, flags=re.MULTILINE)
    assert len(found) == 1, f"{bound[1]} is declared {len(found)} times"
    returns, parameters = found[0]
    types = [x.rpartition(" ")[0] for x in " ".join(parameters.split()).split(", ") if x]
    return types, returns


def python_type(cpp: str) -> str:
    """The stub's word for a C++ type."""
    plain = cpp.strip().removeprefix("const ").removesuffix("&")
    plain = " ".join(ALIASES.get(plain, plain).split())
    if plain in PYTHON_TYPES:
        return PYTHON_TYPES[plain]
    template = re.fullmatch(r"std::(optional|vector|tuple)<(.*)>", plain)
    assert template is not None, f"{cpp}: no Python type is known for it"
    inside = [python_type(x) for x in template[2].split(",")]
    if template[1] == "optional":
        return f"{inside[0]} | None"
    return f"{'list' if template[1] == 'vector' else 'tuple'}[{', '.join(inside)}]"


def test_the_stub_has_the_modules_functions() -> None:
    assert BINDINGS.count("module.def(") == len(definitions())
    assert sorted(stub()) == sorted(definitions())


@pytest.mark.parametrize("function", definitions())
def test_the_stubs_arguments(function: str) -> None:
    """Names, order and defaults are those of module.cpp."""
    assert stub()[function].arguments == bound_arguments(definitions()[function])


@pytest.mark.parametrize("function", definitions())
def test_the_stubs_types(function: str) -> None:
    """Those of the C++ declaration, of arguments and of the result."""
    types, returns = declared(definitions()[function])
    signature = stub()[function]
    assert signature.types == [python_type(x) for x in types]
    assert signature.returns == python_type(returns)


@pytest.mark.skipif(build_info.extension is None, reason="flash_attn_cuda._C is not built here")
def test_the_stub_against_the_built_module() -> None:
    """Functions, and the arguments in the signature that pybind11 writes into each docstring. Its
    spelling of types is another one in every release.
    """
    module = build_info.extension
    assert module is not None
    expected = stub()
    assert [x for x in dir(module) if not x.startswith("_")] == sorted(expected)
    for name, signature in expected.items():
        line = getattr(module, name).__doc__.split("\n", 1)[0]
        (function,) = ast.parse(f"def {line}: ...").body
        assert isinstance(function, ast.FunctionDef) and function.name == name
        assert signature_of(function).arguments == signature.arguments, name
