"""What window_size means in every package whose functions there are: None, negative, zero and huge
bounds, each alone and both, over sequences of more, fewer and as many queries as keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import flash_attn_cuda as ours
from flash_attn_cuda.functions import private
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.integrations import flash_attention_3 as fa3
from flash_attn_cuda.integrations import flash_attention_4 as fa4
from flash_attn_cuda.integrations import ring_flash_attn as ring
from flash_attn_cuda.integrations import vllm
from flash_attn_cuda.integrations.bands import Band
from tests.cases import bands
from tests.cases.bands import BandCase, Ends, Lengths, Rows, Window, make_rows, visible
from tests.cases.harness import DEVICE, no_host_sync
from tests.context_parallel.ranks import alone
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close
from tests.surfaces.calls import ON_EVERY_DEVICE, assert_compiles, assert_same, int32

__all__ = ["alone"]  # pytest finds it here

Results = tuple[Tensor, Tensor]
GPU = [pytest.mark.gpu, pytest.mark.cuda_only]

OF_ONE_LENGTH: tuple[Lengths, ...] = (((7, 9),) * 2, ((9, 5),) * 2, ((6, 6),) * 2)
OF_MANY: Lengths = ((7, 9), (9, 5), (6, 6), (0, 4), (3, 0), (1, 8))
SQUARE: Lengths = ((8, 8), (0, 0), (12, 12), (2, 2))
BOUNDS = (None, -100, -5, -1, 0, 2, 100, 2**40)
FEWER = (None, -5, -1, 0, 2, 2**40)  # where every length has every pair
NUMBERS = (-5, 0, 2, 2**40)


@cache
def rows_of(lengths: Lengths, device: str) -> Rows:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    return make_rows(lengths, device=device, dtype=dtype)


@cache
def expected_of(
    lengths: Lengths, device: str, ends: Ends, backward: bool
) -> tuple[AttentionResult, AttentionResult | None]:
    """(exact, naive) results of rows_of; naive where there is no fp64."""
    rows = rows_of(lengths, device)
    exact = bands.expected(rows, ends, backward=backward)
    naive = None if device == "cpu" else bands.expected(rows, ends, low=True, backward=backward)
    return exact, naive


def assert_right(
    found: AttentionResult, exact: AttentionResult, naive: AttentionResult | None, what: Any
) -> None:
    if naive is not None:
        assert_close(found, exact, naive)
        return
    wanted = exact.tensors()
    for name, x in found.tensors().items():
        # A sink is in fp32, as is its gradient.
        limit = 1e-10 if x.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(
            *(x.double(), wanted[name]),
            rtol=limit,
            atol=limit,
            msg=lambda m, name=name: f"{what}: {name}: {m}",
        )


def check_grid(
    attend: bands.Attend,
    lengths: tuple[Lengths, ...],
    device: str,
    ends_of: Callable[[bool, Window], Ends],
    *,
    bounds: tuple[int | None, ...],
    backward: bool = True,
) -> None:
    """All pairs of bounds, with and without causal."""
    for *window, causal, choice in product(bounds, bounds, (False, True), lengths):
        left, right = window
        found = bands.run(attend, rows_of(choice, device), causal, (left, right), backward=backward)
        results = expected_of(choice, device, ends_of(causal, (left, right)), backward)
        assert_right(found, *results, (choice, left, right, causal))


# -- FlashAttention-4's rule -----------------------------------------------------------------------


@ON_EVERY_DEVICE
@pytest.mark.parametrize("layout", bands.LAYOUTS)
def test_flash_attention_4(layout: str, device: str) -> None:
    is_dense = layout == "dense"
    check_grid(
        bands.LAYOUTS[layout],
        OF_ONE_LENGTH if is_dense else (OF_MANY,),
        device,
        bands.ends_of_flash_attention_4,
        bounds=FEWER if is_dense else BOUNDS,
        backward=layout != "pages",
    )


SEEN: dict[tuple[Window, bool], list[str]] = {
    ((None, None), False): ["11111", "11111", "11111"],
    ((-3, -1), False): ["11111", "11111", "11111"],
    ((-3, -1), True): ["11100", "11110", "11111"],
    ((None, -1), False): ["11000", "11100", "11110"],
    ((None, -3), False): ["00000", "10000", "11000"],
    ((-1, None), False): ["00011", "00001", "00000"],
    ((3, -2), False): ["10000", "11000", "01100"],
    ((-1, 2), False): ["00011", "00001", "00000"],
    ((0, 0), False): ["00100", "00010", "00001"],
    ((-1, 0), False): ["00000", "00000", "00000"],
    ((-1, None), True): ["00000", "00000", "00000"],
    ((2, -3), False): ["00000", "00000", "00000"],
    ((None, -3), True): ["11100", "11110", "11111"],
    ((1, 100), False): ["01111", "00111", "00011"],
}


@pytest.mark.parametrize(("window", "causal"), SEEN)
def test_keys_of_flash_attention_4(window: Window, causal: bool) -> None:
    """Three queries and five keys, written out: each out row tells which keys its query sees."""
    q = torch.zeros(1, 3, 1, 8, dtype=torch.float64)
    k = torch.zeros(1, 5, 1, 8, dtype=torch.float64)
    v = torch.eye(5, 8, dtype=torch.float64)[None, :, None]
    out, lse = fa4.flash_attn_func(q, k, v, causal=causal, window_size=window, return_lse=True)
    wanted = [[float(digit) for digit in row] for row in SEEN[window, causal]]
    assert (out[0, :, 0, :5] > 0).double().tolist() == wanted
    assert lse is not None
    torch.testing.assert_close(lse[0, 0], torch.tensor(wanted).double().sum(1).log())
    sink = torch.tensor([0.5])  # which rows of no key have too
    options: dict[str, Any] = {"causal": causal, "window_size": window, "learnable_sink": sink}
    options["return_lse"] = True
    _, with_sink = fa4.flash_attn_func(q, k, v, **options)
    bounds = {"cu_seqlens_q": int32("cpu", 0, 3), "cu_seqlens_k": int32("cpu", 0, 5)}
    _, of_packed = fa4.flash_attn_varlen_func(q[0], k[0], v[0], **bounds, **options)
    assert with_sink is not None and of_packed is not None
    torch.testing.assert_close(with_sink[0], lse[0].logaddexp(sink.double()))
    torch.testing.assert_close(of_packed, with_sink[0])
    ends = bands.ends_of_flash_attention_4(causal, window)
    assert visible(ends, 3, 5).double().tolist() == wanted


END = st.none() | st.integers(-12, 12) | st.sampled_from([-(2**40), -(2**31), 2**31, 2**62])
LENGTH = st.tuples(st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=60, deadline=None, database=None)
@given(
    layout=st.sampled_from([*bands.LAYOUTS]),
    lengths=st.lists(LENGTH, min_size=1, max_size=3),
    window=st.tuples(END, END),
    causal=st.booleans(),
    has_sink=st.booleans(),
    softcap=st.sampled_from([0.0, 3.0]),
)
def test_any_band(layout: str, lengths: list[tuple[int, int]], **fields: Any) -> None:
    """Against a plain mask, with gradients; with a sink rows of no key have that."""
    if layout == "dense":
        lengths = [lengths[0]] * len(lengths)
    case = BandCase(layout, tuple(lengths), dtype=torch.float64, head_dim=8, **fields)
    rows = case.rows()
    assert_right(case.run(rows), case.reference(rows)[0], None, case)


@settings(max_examples=100, deadline=None, database=None)
@given(
    first=st.none() | st.integers(-12, 12),
    last=st.none() | st.integers(-12, 12),
    length=LENGTH,
)
def test_a_band_is_a_window_of_shorter_sequences(
    first: int | None, last: int | None, length: tuple[int, int]
) -> None:
    """The same pairs are visible, and what is hidden sees or is seen by nothing."""
    causal, window, hidden = Band(first, last).as_window()
    seen = visible((first, last), *length)
    queries, keys = (max(n - x, 0) for n, x in zip(length, hidden, strict=True))
    assert not seen[queries:].any() and not seen[:, keys:].any()
    ends = bands.ends_of_flash_attention_2(causal, window)  # type: ignore[arg-type]
    assert torch.equal(seen[:queries, :keys], visible(ends, queries, keys))


# -- FlashAttention-2's rule -----------------------------------------------------------------------


def with_batch(function: Callable[..., Any], **options: Any) -> bands.Attend:
    """Of a function of sequences of one length."""

    def attend(rows: Rows, causal: bool, window: Window) -> Results:
        q, k, v = (x.unflatten(0, (len(rows.lengths), -1)) for x in (rows.q, rows.k, rows.v))
        results = function(
            q, k, v, causal=causal, window_size=window, return_attn_probs=True, **options
        )
        return results[0].flatten(0, 1), results[1].transpose(0, 1).flatten(1)

    return attend


def with_packed(function: Callable[..., Any], probs: str = "return_attn_probs") -> bands.Attend:
    def attend(rows: Rows, causal: bool, window: Window) -> Results:
        results = function(
            *(rows.q, rows.k, rows.v),
            **rows.packed(),
            causal=causal,
            window_size=window,
            **{probs: True},
        )
        return results[0], results[1]

    return attend


def private_dense(rows: Rows, causal: bool, window: Window) -> Results:
    q, k, v = (x.unflatten(0, (len(rows.lengths), -1)) for x in (rows.q, rows.k, rows.v))
    out, lse, _, _ = private._flash_attn_forward(
        *(q, k, v, 0.0, 0.25, causal, *window, 0.0, None, False)
    )
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def private_packed(rows: Rows, causal: bool, window: Window) -> Results:
    bounds = rows.packed()
    out, lse, _, _ = private._flash_attn_varlen_forward(
        *(rows.q, rows.k, rows.v), *bounds.values(), 0.0, 0.25, causal, *window
    )
    return out, lse


def with_pages(function: Callable[..., Any], probs: str) -> bands.Attend:
    def attend(rows: Rows, causal: bool, window: Window) -> Results:
        k, v, pages = rows.of_pages(4)
        bounds = {**rows.packed(), "cu_seqlens_k": None}
        results = function(
            **{"q": rows.q, "k": k, "v": v, "block_table": pages, probs: True},
            **bounds,
            seqused_k=rows.used()["seqused_k"],
            causal=causal,
            window_size=window,
        )
        return results[0], results[1]

    return attend


def with_cache(function: Callable[..., Any]) -> bands.Attend:
    def attend(rows: Rows, causal: bool, window: Window) -> Results:
        bounds = rows.packed()
        results = function(
            rows.q,
            *(rows.batch(x, rows.lengths_k) for x in (rows.k, rows.v)),
            cache_seqlens=rows.used()["seqused_k"],
            cu_seqlens_q=bounds["cu_seqlens_q"],
            max_seqlen_q=bounds["max_seqlen_q"],
            causal=causal,
            window_size=window,
            return_softmax_lse=True,
        )
        return results[0], results[1]

    return attend


OF_2, EACH = bands.ends_of_flash_attention_2, (None, -5, 0, 2, 2**40)
LSE, PROBS = "return_softmax_lse", "return_attn_probs"
# Lengths, bounds, and whether there are gradients. The private functions take numbers alone.
Grid = tuple[bands.Attend, tuple[Lengths, ...], tuple[int | None, ...], bool]
GRIDS: dict[str, Grid] = {
    "ours-dense": (with_batch(ours.flash_attn_func), OF_ONE_LENGTH, EACH, True),
    "ours-packed": (with_packed(ours.flash_attn_varlen_func), (OF_MANY,), EACH, True),
    "fa3-dense": (with_batch(fa3.flash_attn_func), OF_ONE_LENGTH, EACH, True),
    "fa3-packed": (with_packed(fa3.flash_attn_varlen_func), (OF_MANY,), EACH, True),
    "vllm-packed": (with_packed(vllm.flash_attn_varlen_func, LSE), (OF_MANY,), EACH, True),
    "ours-cache": (with_cache(ours.flash_attn_with_kvcache), (OF_MANY,), EACH, False),
    "fa3-cache": (with_cache(fa3.flash_attn_with_kvcache), (OF_MANY,), EACH, False),
    "ours-pages": (with_pages(ours.flash_attn_varlen_func, PROBS), (OF_MANY,), EACH, False),
    "vllm-pages": (with_pages(vllm.flash_attn_varlen_func, LSE), (OF_MANY,), EACH, False),
    "private-dense": (private_dense, OF_ONE_LENGTH, NUMBERS, True),
    "private-packed": (private_packed, (OF_MANY,), NUMBERS, True),
}


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", GRIDS)
def test_each_bound_on_its_own(name: str, device: str) -> None:
    attend, lengths, bounds, backward = GRIDS[name]
    check_grid(attend, lengths, device, OF_2, bounds=bounds, backward=backward)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_vllm_has_one_rule_for_every_version(version: int) -> None:
    """It makes None of a negative bound for FlashAttention-4's functions, each on its own."""
    rows = rows_of(OF_MANY, "cpu")
    for window in ((-1, -5), (6, -2), [-5, 3], None):
        options = {"fa_version": version, "return_softmax_lse": True}
        found = vllm.flash_attn_varlen_func(
            rows.q, rows.k, rows.v, **rows.packed(), window_size=window, **options
        )
        ends = OF_2(False, (None, None) if window is None else tuple(window))
        exact, _ = expected_of(OF_MANY, "cpu", ends, False)
        assert_right(AttentionResult(*found), exact, None, window)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stem", ["ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn"])
def test_ring_flash_attn(stem: str) -> None:
    """Over several ranks: test_ring_flash_attn.py."""
    function = getattr(ring, f"{stem}_varlen_func", None)
    bounds = [*bands.bounds_of([x for x, _ in SQUARE], "cpu").tolist()]

    def attend(rows: Rows, causal: bool, window: Window) -> Results:
        options = {"causal": causal, "window_size": window, "return_attn_probs": True}
        if function is None:  # stripes are of one length
            return with_batch(getattr(ring, f"{stem}_func"))(rows, causal, window)
        results = function(rows.q, rows.k, rows.v, bounds, None, **options)
        return results[0], results[1]

    lengths = ((12, 12),) * 2 if function is None else SQUARE
    check_grid(attend, (lengths,), "cpu", OF_2, bounds=(None, -5, 0, 2, 2**40))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.skipif(
    "window_size" not in signature(varlen_attn).parameters, reason="this torch has no window_size"
)
def test_varlen_attn_of_torch(device: str) -> None:
    """By this package's kernels: a pair of numbers, negative for unlimited."""
    request = torch.nn.attention.varlen.AuxRequest(lse=True)
    # Younger ones ask for it where heads are shared.
    shares_heads = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}

    def attend(rows: Rows, causal: bool, window: Window) -> Results:
        window = (window[0], 0) if causal else window
        bounds = rows.packed().values()
        return varlen_attn(
            *(rows.q, rows.k, rows.v, *bounds),
            window_size=window,
            return_aux=request,
            **shares_heads,
        )

    torch.nn.attention.activate_flash_attention_impl("flash_attn_cuda")
    try:
        for index, window in enumerate(product(NUMBERS, NUMBERS)):
            rows, causal = rows_of(OF_MANY, device), index % 2 == 1
            found = bands.run(attend, rows, causal, window, backward=False)
            assert_right(found, *expected_of(OF_MANY, device, OF_2(causal, window), False), window)
    finally:
        build_info.extension.give_back_aten_operators()


# -- what a window_size may be ---------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ours": ours.flash_attn_func,
    "fa3": fa3.flash_attn_func,
    "fa4": fa4.flash_attn_func,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_and_lists(name: str) -> None:
    """One of two integers, or a bound that is one."""
    q, k, v = (x[None] for x in (lambda r: (r.q, r.k, r.v))(rows_of(((7, 9),), "cpu")))

    def attend(window: Any) -> Tensor:
        results = FUNCTIONS[name](q, k, v, window_size=window)
        return results[0] if isinstance(results, tuple) else results

    for window in ((6, -2), (-2, 6), (2, 0), (-5, -7)):
        expected = attend(window)
        for same in (
            list(window),
            torch.tensor(window),
            (torch.tensor(window[0]), window[1]),
            tuple(torch.tensor([x], dtype=torch.int32) for x in window),
        ):
            assert_same(attend(same), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "wrong", [(1, 2, 3), "ab", 3, (1.5, 2), (None,), torch.tensor([1.5, 2.0])], ids=str
)
def test_what_is_no_window(name: str, wrong: Any) -> None:
    rows = rows_of(((7, 9),), "cpu")
    with pytest.raises(TypeError, match=r"^window_size: must be two integers, got"):
        FUNCTIONS[name](rows.q[None], rows.k[None], rows.v[None], window_size=wrong)


# -- bands of FlashAttention-4 with everything else ------------------------------------------------


@ON_EVERY_DEVICE
@pytest.mark.parametrize("window", [(None, -40), (-30, None), (90, -20), (-20, 90), (-9, 3)])
def test_bands_of_listed_blocks(window: Window, device: str) -> None:
    """A band hides pairs of listed blocks."""
    rows = make_rows(
        ((260, 200),) * 2,
        device=device,
        dtype=torch.float64 if device == "cpu" else torch.bfloat16,
    )
    blocks = torch.tensor([[1, 0], [1, 1], [0, 1]], dtype=torch.bool)[None, None]
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = (~blocks).int().argsort(dim=-1, stable=True).int()
    tensors = fa4.BlockSparseTensorsTorch(
        counts.to(device), indices.to(device), block_size=(128, 128)
    )
    pairs = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :260, :200]
    mask = pairs & visible(bands.ends_of_flash_attention_4(False, window), 260, 200)
    q, k, v = (x.unflatten(0, (2, -1)) for x in (rows.q, rows.k, rows.v))
    for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = function(*leaves, window_size=window, block_sparse_tensors=tensors)
        assert lse is not None
        dout = rows.dout.view(out.shape)
        gradients = torch.autograd.grad(out, leaves, dout)
        wanted = ours.flash_attn_func(*leaves, attn_mask=mask.to(device))
        expected = (wanted, *torch.autograd.grad(wanted, leaves, dout))
        limit = 1e-10 if device == "cpu" else 0.06
        for x, y in zip((out, *gradients), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=limit, atol=limit)


@pytest.mark.parametrize("window", [(None, -5), (-5, None), (-5, 2), (6, -2), (-1, -1)])
def test_a_mask_mod_alone_decides(window: Window) -> None:
    rows = rows_of(((7, 9),) * 2, "cpu")
    q, k, v = (x.unflatten(0, (2, -1)) for x in (rows.q, rows.k, rows.v))

    def even(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query + key) % 2 == 0

    expected = fa4.flash_attn_func(q, k, v, mask_mod=even)[0]
    found = fa4.flash_attn_func(q, k, v, mask_mod=even, window_size=window)[0]
    assert torch.equal(found, expected)
    with pytest.raises(TypeError, match=r"^window_size: must be two integers"):
        fa4.flash_attn_func(q, k, v, mask_mod=even, window_size=(1.5, 2))


def test_full_graphs() -> None:
    rows = rows_of(((7, 9),) * 2, "cpu")
    q, k, v = (x.unflatten(0, (2, -1)) for x in (rows.q, rows.k, rows.v))
    options: dict[str, Any] = {"learnable_sink": torch.randn(4), "return_lse": True}
    assert_compiles(lambda q: fa4.flash_attn_func(q, k, v, window_size=(-2, 6), **options), q)
    lengths = {"cu_seqlens_q": int32("cpu", 0, 5, 14), "seqused_k": int32("cpu", 5, 9)}
    assert_compiles(
        lambda q: fa4.flash_attn_varlen_func(
            q, k, v, **lengths, max_seqlen_q=9, window_size=(6, -2), **options
        ),
        q.flatten(0, 1),
    )


def test_under_autocast() -> None:
    rows = rows_of(((7, 9),) * 2, "cpu")
    q, k, v = (x.float().unflatten(0, (2, -1)) for x in (rows.q, rows.k, rows.v))
    used = {"seqused_k": int32("cpu", 5, 9)}
    for window in ((None, -3), (-2, None)):
        wanted = fa4.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), window_size=window)
        of_used = fa4.flash_attn_varlen_func(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), window_size=window, **used
        )
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(fa4.flash_attn_func(q, k, v, window_size=window)[0], wanted[0])
            found = fa4.flash_attn_varlen_func(q, k, v, window_size=window, **used)
        assert_same(found[0], of_used[0])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "seqused_k": ({"seqused_k": (5, 10)}, "seqused_k: must be from 0 to 9, got 10 at index 1"),
    "seqused_q": ({"seqused_q": (-1, 7)}, "seqused_q: must be from 0 to 7, got -1 at index 0"),
    "lengths": ({"seqused_k": (5, 9, 9)}, r"seqused_k: must have shape \(2,\), got \(3,\)"),
}


@pytest.mark.parametrize("window", [(None, -3), (-2, None), (3, 2)])
def test_what_is_wrong_is_refused(window: Window) -> None:
    """Lengths as given, not as they are without the rows that a band hides."""
    rows = rows_of(((7, 9),) * 2, "cpu")
    q, k, v = (x.unflatten(0, (2, -1)) for x in (rows.q, rows.k, rows.v))
    for wrong, match in WRONG.values():
        lengths = {name: int32("cpu", *values) for name, values in wrong.items()}
        with pytest.raises(ValueError, match=f"^{match}"):
            fa4.flash_attn_varlen_func(q, k, v, **lengths, window_size=window)
    match = r"^v: must have the shape of k .* \(2, 9, 2, 16\), got \(2, 8, 2, 16\)"
    for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func):
        with pytest.raises(ValueError, match=match):
            function(q, k, v[:, :8], window_size=window)
        with pytest.raises(TypeError, match=r"^k: must be a torch.Tensor, got int"):
            function(q, 3, v, window_size=window)


@pytest.mark.gpu
@pytest.mark.cuda_only
def test_nothing_waits_for_the_device() -> None:
    rows = rows_of(OF_MANY, DEVICE)
    used, bounds = rows.used(), rows.packed()
    sink = torch.zeros(4, device=DEVICE)
    for window in ((None, -3), (-2, None), (-2, 6), (-4, 2)):
        options: dict[str, Any] = {"window_size": window, "learnable_sink": sink}
        with no_host_sync():
            fa4.flash_attn_varlen_func(rows.q, rows.k, rows.v, **bounds, **used, **options)
            fa4.flash_attn_func(rows.q[None], rows.k[None], rows.v[None], **options)
