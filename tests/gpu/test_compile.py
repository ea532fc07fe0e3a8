"""torch.compile, opcheck and export of every public function, on the device under test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from flash_attn_cuda import flash_attn_func
from tests.cases.harness import DEVICE, ON_CPU, bits, make_case, skip_without_row
from tests.cases.inductor import has_python_headers
from tests.cases.public_calls import PUBLIC_CALLS, PublicCall, normal

pytestmark = pytest.mark.gpu

CALLS = pytest.mark.parametrize("call", PUBLIC_CALLS, ids=str)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    skip_without_row(make_case(head_dim=64, causal=True))
    torch._dynamo.reset()


def assert_close(
    call: PublicCall, actual: dict[str, Tensor], expected: dict[str, Tensor], context: str = ""
) -> None:
    """To a rounding or two: dq is summed in any order, and compilers fuse what is around it. What
    is written in place has the same bits, and lse (output1) is no sum of rounded numbers.
    """
    for name, y in expected.items():
        x = actual[name]
        if name in call.mutated:
            assert torch.equal(bits(x), bits(y)), f"{context} {name}"
            continue
        tolerance = 1e-4 if name == "output1" and y.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{context} {n}: {m}"
        )


@CALLS
def test_compile_fullgraph_with_dynamic_shapes(call: PublicCall) -> None:
    """One graph for all sizes: outputs, gradients and what is written in place."""
    graphs = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    compiled = torch.compile(call.function, fullgraph=True, dynamic=True, backend=backend)
    for size in (2, 3, 5):
        arguments = call.make(size)
        expected = call.run(call.function, arguments)
        assert_close(call, call.run(compiled, arguments), expected, f"size {size}")
    assert len(graphs) == 1, f"compiled {len(graphs)} times for three sizes"


@CALLS
def test_compile_through_aot_autograd(call: PublicCall) -> None:
    """Functionalised, traced forward and backward: fakes and mutation annotations must be right."""
    compiled = torch.compile(call.function, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (2, 4):
        arguments = call.make(size)
        expected = call.run(call.function, arguments)
        if call.dropout:  # traced graphs may draw another seed
            expected = {name: x for name, x in expected.items() if name == "output1"}
        assert_close(call, call.run(compiled, arguments), expected, f"size {size}")


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    "call",
    [c for c in PUBLIC_CALLS if c.name in ("dense_plain", "varlen", "append", "paged_append")],
    ids=str,
)
def test_compile_with_inductor(call: PublicCall) -> None:
    if not has_python_headers():
        pytest.skip("inductor needs Python's headers")
    arguments = call.make(3)
    expected = call.run(call.function, arguments)
    compiled = torch.compile(call.function, fullgraph=True)
    assert_close(call, call.run(compiled, arguments), expected)


@pytest.mark.cuda_only
def test_compile_with_cuda_graphs() -> None:
    """reduce-overhead captures the call; the custom op must say what it writes."""
    if not has_python_headers():
        pytest.skip("inductor needs Python's headers")
    call = next(c for c in PUBLIC_CALLS if c.name == "decode")
    compiled = torch.compile(call.function, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        arguments = call.make(2)
        expected = call.run(call.function, arguments)
        assert_close(call, call.run(compiled, arguments), expected)


# -- opcheck ---------------------------------------------------------------------------------------


class OperatorCalls(TorchDispatchMode):
    """Records the package's operators that run below it, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "flash_attn_cuda":
            copied = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs or {}))
            self.calls.append((func, *copied))
        return func(*args, **(kwargs or {}))


def _is_differentiable(op: Any) -> bool:
    """The gradients' own operator refuses a second differentiation; mutating ones have none."""
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
    is_forward = "forward" in op._schema.name and "backward" not in op._schema.name
    return is_forward and not writes


@CALLS
def test_opcheck(call: PublicCall) -> None:
    """Every operator that the call and its backward run, with the arguments they get."""
    with OperatorCalls() as recorded:
        call.run(call.function, call.make(2))
    assert recorded.calls, "no operator of the package ran"
    for op, args, kwargs in recorded.calls:
        tests: tuple[str, ...] = ("test_schema", "test_faketensor")
        if not call.dropout:  # the others compare two runs, which draw two masks
            tests += ("test_autograd_registration", "test_aot_dispatch_dynamic")
        if call.leaves and _is_differentiable(op):
            args, kwargs = tree_map_only(
                Tensor, lambda x: x.requires_grad_(x.is_floating_point()), (args, kwargs)
            )
        torch.library.opcheck(op, args, kwargs, test_utils=tests, atol=2e-2, rtol=2e-2)


# -- in a model ------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(64, 3 * 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).unbind(2)
        out = flash_attn_func(q, k, v, causal=True, window_size=(7, 0), softcap=20.0)
        return x + out.flatten(-2)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_export(strict: bool) -> None:
    model = Block().to(DEVICE, torch.bfloat16)
    seqlen = torch.export.Dim("seqlen", min=2, max=512)
    program = torch.export.export(
        model, (normal(2, 40, 64),), dynamic_shapes=({1: seqlen},), strict=strict
    )
    assert "flash_attn_cuda" in str(program.graph)
    for length in (3, 90):
        x = normal(2, length, 64)
        torch.testing.assert_close(program.module()(x), model(x), rtol=2e-2, atol=2e-2)


def test_compiled_training_step_learns() -> None:
    """A few steps of gradient descent through the compiled block: the same losses as eager."""
    x, target = normal(2, 40, 64), normal(2, 40, 64)
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Block().to(DEVICE, torch.bfloat16)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        backend = "aot_eager" if ON_CPU or not has_python_headers() else "inductor"
        step = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        run = []
        for _ in range(5):
            loss = (step(x).float() - target.float()).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            run.append(loss.item())
        losses.append(run)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
