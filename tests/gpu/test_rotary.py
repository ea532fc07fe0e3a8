"""The rotary kernel against the rotation in fp64, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cuda.functions import rotary
from flash_attn_cuda.functions.rotary import apply_rotary_emb
from flash_attn_cuda.integrations.rotary_layers import apply_rotary, apply_rotary_emb_qkv_
from tests.cases.bad_input import INT_MAX, INT_MIN, Guard
from tests.cases.harness import DEVICE, ON_CPU, bits, scaled
from tests.cases.rotary import POSITIONS, RotaryCase, arranged, difference, rotary_cases
from tests.reference.kvcache import rotate

pytestmark = pytest.mark.gpu

CASES = tuple(rotary_cases(DEVICE))
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _by_the_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test calls runs the kernel, but for those that say otherwise."""
    if ON_CPU or "any_way" in request.fixturenames:
        return

    def fail(*_: Any) -> None:
        raise AssertionError("torch's operators ran instead of the kernel")

    monkeypatch.setattr(rotary, "_rotate_by_operators", fail)


@pytest.fixture
def any_way() -> None:
    """Of tests in which torch's operators may run."""


def on_device(case: RotaryCase, seed: int = 0) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    cos, sin = (table.to(DEVICE) for table in case.make_tables(seed))
    return arranged(case.make_x(seed).to(DEVICE), case.layout), (cos, sin)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Bit by bit; torch's operators may make another NaN of one."""
    if ON_CPU:
        actual, expected = (x.masked_fill(x.isnan(), torch.nan) for x in (actual, expected))
    assert torch.equal(bits(actual.contiguous()), bits(expected.contiguous()))


def assert_rotated(actual: Tensor, expected: Tensor) -> None:
    wrong = difference(actual, expected)
    assert wrong is None, wrong


@each_case
def test_values_in_place_and_not(case: RotaryCase) -> None:
    x, tables = on_device(case)
    buffer = x if x._base is None else x._base
    before = buffer.clone()
    expected = case.expected(x, tables)
    out = case.run(x, tables)
    assert out.is_contiguous() and out.dtype == x.dtype
    assert_rotated(out, expected)
    assert torch.equal(bits(buffer), bits(before)), "x was written"
    version = x._version
    in_place = case.run(x, tables, inplace=True)
    assert in_place is x and x._version > version
    assert_same(x, out)
    for every in (buffer, before):
        every.as_strided(x.shape, x.stride(), x.storage_offset()).zero_()
    assert torch.equal(bits(buffer), bits(before)), "written around x"


@each_case
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients(case: RotaryCase, inplace: bool) -> None:
    """The rotation by the negative angles, of a gradient of any layout."""
    x, tables = on_device(case)
    dout = arranged(case.make_x(seed=3).to(DEVICE), case.layout)
    leaf = x.clone().requires_grad_()
    out = case.run(leaf * 1.0, tables, inplace=inplace)
    (dx,) = torch.autograd.grad(out, leaf, dout)
    expected = case.expected(dout, (tables[0], -tables[1]))
    assert dx.dtype == x.dtype
    assert_rotated(dx, expected)


@settings(
    max_examples=scaled(150, 30),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), seed=st.integers(0, 1 << 20))
def test_random_cases(data: st.DataObject, seed: int) -> None:
    draw = data.draw
    dtypes = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))
    head_dim = draw(st.one_of(st.integers(1, 40).map(lambda x: 8 * x), st.integers(1, 300)))
    packed = draw(st.booleans())
    lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)
    case = RotaryCase(
        dtype=draw(dtypes),
        table_dtype=draw(dtypes),
        lengths=draw(lengths) if packed else (draw(st.integers(0, 9)),) * draw(st.integers(1, 4)),
        packed=packed,
        num_heads=draw(st.integers(1, 40)),
        head_dim=head_dim,
        rotary_dim=2 * draw(st.integers(0, head_dim // 2)),
        interleaved=draw(st.booleans()),
        offsets=draw(st.integers(0, 30)),
        index_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        layout=draw(st.sampled_from(("contiguous", "heads", "odd", "columns"))),
        device=DEVICE,
    )
    x, tables = on_device(case, seed)
    out = case.run(x, tables)
    assert_rotated(out, case.expected(x, tables))
    assert_same(case.run(x, tables, inplace=True), out)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_any_layout(interleaved: bool) -> None:
    """Rows that start on no boundary, and columns that are apart."""
    case = RotaryCase(interleaved=interleaved, device=DEVICE)
    x, (cos, sin) = on_device(case)
    expected = case.run(x, (cos, sin))
    odd = [torch.cat([table[:, :1], table], 1)[:, 1:] for table in (cos, sin)]
    apart = [table.mT.contiguous().mT for table in (cos, sin)]
    for tables in (odd, apart, (odd[0], sin), (cos, apart[1])):
        assert_same(case.run(x, (tables[0], tables[1])), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_conjugate_and_what_infinity_leaves_alone(interleaved: bool) -> None:
    case = RotaryCase(interleaved=interleaved, head_dim=96, rotary_dim=64, device=DEVICE)
    x, (cos, sin) = on_device(case)
    x[..., 64:] = torch.inf
    out = apply_rotary(x, cos, sin, interleaved=interleaved, conjugate=True)
    assert_rotated(out[..., :64], case.expected(x, (cos, -sin))[..., :64])
    assert torch.equal(out[..., 64:], x[..., 64:])


@pytest.mark.parametrize("layout", ["packed", "grouped"])
def test_packed_projections_and_their_gradients(layout: str) -> None:
    case = RotaryCase(num_heads=4, device=DEVICE)
    x, tables = on_device(case)
    shape = (2, 7, 3, 4, 64) if layout == "packed" else (2, 7, 12, 64)
    leaf = x.repeat(1, 1, 3, 1).view(shape).requires_grad_()
    heads = {} if layout == "packed" else {"num_heads_q": 4}
    out = apply_rotary_emb_qkv_(leaf * 1.0, *tables, **heads).view(2, 7, 3, 4, 64)
    turned, dout = case.run(x, tables), case.make_x(seed=3).to(DEVICE)
    for index in (0, 1):
        assert torch.equal(out[:, :, index], turned)
    assert torch.equal(out[:, :, 2], x)
    (gradient,) = torch.autograd.grad(out, leaf, torch.stack([dout, 2 * dout, dout], 2))
    back = apply_rotary(dout, *tables, conjugate=True)
    assert torch.equal(gradient.view(out.shape), torch.stack([back, 2 * back, dout], 2))


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_of_gradients(inplace: bool) -> None:
    case = RotaryCase(dtype=torch.float32, device=DEVICE)
    x, tables = on_device(case)
    leaf, dout = x.clone().requires_grad_(), torch.randn_like(x).requires_grad_()
    out = case.run(leaf * 1.0, tables, inplace=inplace)
    (dx,) = torch.autograd.grad(out, leaf, dout, create_graph=True)
    (again,) = torch.autograd.grad(dx, dout, x)
    assert_rotated(again, case.expected(x, tables))


# Where torch's operators run


def test_gradients_of_tables_and_of_transforms(any_way: None) -> None:
    case = RotaryCase(dtype=torch.float32, device=DEVICE)
    x, tables = on_device(case)
    expected = case.run(x, tables)
    cos, sin = (table.clone().requires_grad_() for table in tables)
    case.run(x, (cos, sin)).sum().backward()
    assert cos.grad is not None and cos.grad.any() and sin.grad is not None
    gradient = torch.func.grad(lambda x: case.run(x, tables).square().sum() / 2)(x)
    torch.testing.assert_close(gradient, x)  # a rotation keeps lengths
    mapped = torch.vmap(lambda x: case.run(x, tables))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(mapped, torch.stack([expected, 2 * expected]))
    leaf = x.clone().requires_grad_()
    douts = torch.randn(3, *x.shape, device=DEVICE)
    (batched,) = torch.autograd.grad(case.run(leaf, tables), leaf, douts, is_grads_batched=True)
    for one, dout in zip(batched, douts, strict=True):
        torch.testing.assert_close(one, apply_rotary(dout, *tables, conjugate=True))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        tangent = torch.autograd.forward_ad.unpack_dual(case.run(dual, tables)).tangent
    torch.testing.assert_close(tangent, expected)
    doubles = case.run(x.double(), tables)
    torch.testing.assert_close(doubles, case.expected(x, tables))


# What only the device knows


@pytest.mark.cuda_only
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [64, 59])
def test_positions_without_a_row(
    index_dtype: torch.dtype, packed: bool, interleaved: bool, head_dim: int
) -> None:
    """They stay as they are, in place and not; nothing around the tensors is read or written."""
    limits = torch.iinfo(index_dtype)
    offsets = (POSITIONS - 2, -3, limits.max, limits.min, POSITIONS, 0)
    case = RotaryCase(
        lengths=(5,) * len(offsets),
        offsets=offsets,
        index_dtype=index_dtype,
        packed=packed,
        interleaved=interleaved,
        head_dim=head_dim,
        device=DEVICE,
    )
    guards = [Guard("x", case.make_x().to(DEVICE), 3)]
    guards += [
        Guard(name, x.to(DEVICE), 50)
        for name, x in zip(("cos", "sin"), case.make_tables(), strict=True)
    ]
    x, cos, sin = (guard.tensor for guard in guards)
    before = x.clone()
    out = case.run(x, (cos, sin))
    assert_rotated(out, case.expected(x, (cos, sin)))
    case.run(x, (cos, sin), inplace=True)
    assert torch.equal(bits(x), bits(out))
    positions = case.positions().to(DEVICE)
    unknown = (positions < 0) | (positions >= POSITIONS)
    assert torch.equal(bits(out[unknown]), bits(before[unknown]))
    for guard in guards:
        guard.check()


BAD_BOUNDS = (
    (3, 1, 9, 5, 17),
    (-5, 4, 8, 12, 17),
    (0, 4, 8, 12, INT_MAX),
    (0, INT_MIN, INT_MAX, 3, 17),
    (INT_MAX, INT_MAX, INT_MIN, -1, 0),
    (18, 19, 20, 21, 22),
)


@pytest.mark.cuda_only
@pytest.mark.parametrize("bounds", BAD_BOUNDS, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_bounds_out_of_order(bounds: tuple[int, ...], inplace: bool) -> None:
    """Every row is a rotation by some row of the tables or the row itself: nothing else is read."""
    guards = [Guard("x", torch.randn(17, 3, 64).to(DEVICE), 5)]
    angles = torch.randn(30, 32)
    guards += [Guard("cos", angles.cos().to(DEVICE), 50), Guard("sin", angles.sin().to(DEVICE), 50)]
    x, cos, sin = (guard.tensor for guard in guards)
    cu_seqlens = Guard("cu_seqlens", torch.tensor(bounds, dtype=torch.int32).to(DEVICE), 5)
    offsets = torch.tensor((0, 3, 29, -1), dtype=torch.int32, device=DEVICE)
    before = x.clone()
    out = apply_rotary_emb(
        x, cos, sin, inplace=inplace, seqlen_offsets=offsets, cu_seqlens=cu_seqlens.tensor
    )
    possible = [before.double()]
    for position in range(30):
        at = torch.full((17,), position, device=DEVICE)
        possible.append(rotate(before.double(), cos, sin, at, False))
    errors = (torch.stack(possible) - out.double()).abs().amax((-1, -2))
    assert errors.amin(0).max() < 1e-5
    for guard in (*guards, cu_seqlens):
        guard.check()


@pytest.mark.cuda_only
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_nothing_waits_and_a_graph_follows_its_offsets(index_dtype: torch.dtype) -> None:
    case = RotaryCase(offsets=(0, 4), index_dtype=index_dtype, device=DEVICE)
    x, tables = on_device(case)
    arguments = case.arguments()
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply_rotary_emb(x, *tables, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply_rotary_emb(x, *tables, **arguments)
    for offsets in ((0, 4), (20, 33), (100, 0)):
        arguments["seqlen_offsets"].copy_(torch.tensor(offsets))
        graph.replay()
        now = RotaryCase(offsets=offsets, device=DEVICE)
        assert_rotated(out, now.expected(x, tables))


@pytest.mark.cuda_only
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_tensors_of_more_than_2_31_elements(dtype: torch.dtype) -> None:
    heads, head_dim = 65, 128
    tokens = 2**31 // (heads * head_dim) + 5
    needed = 2.2 * tokens * heads * head_dim * dtype.itemsize
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB")
    x = torch.ones(1, tokens, heads, head_dim, dtype=dtype, device=DEVICE)
    cos = torch.zeros(tokens, head_dim // 2, dtype=dtype, device=DEVICE)
    out = apply_rotary_emb(x, cos, cos + 1)  # a quarter turn: (1, 1) becomes (-1, 1)
    assert (out[0, -3:, :, :64] == -1).all() and (out[0, -3:, :, 64:] == 1).all()
    assert (out[0, :, -1, 0] == -1).all() and (out[0, :, -1, -1] == 1).all()


# Refusals (tests/surfaces/test_rotary.py has those that no device tells apart)


@pytest.mark.cuda_only
def test_tables_on_another_device(any_way: None) -> None:
    x, (cos, sin) = on_device(RotaryCase(device=DEVICE))
    with pytest.raises(ValueError, match="sin: must be on the device of x"):
        apply_rotary_emb(x, cos, sin.cpu())


@pytest.mark.cuda_only
@pytest.mark.parametrize("dim", [0, 2])
def test_memory_named_twice_is_not_written(dim: int) -> None:
    case = RotaryCase(device=DEVICE)
    x, tables = on_device(case)
    x = x.narrow(dim, 0, 1).expand(x.shape)
    assert_rotated(case.run(x, tables), case.expected(x, tables))
    with pytest.raises(ValueError, match="x: must not name memory twice"):
        case.run(x, tables, inplace=True)
