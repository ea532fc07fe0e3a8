"""Speed of derivatives in a direction and of second derivatives, in operations per second.

    python -m benchmarks.suites.second_order --json second_order.json
    python -m benchmarks.suites.second_order --quick --head-dims 128

A jvp is the forward and its derivative in the direction of tangents of q, k and v, in forward mode
and without a graph; its operations are counted as 3 times the forward's. An hvp is the second
backward: the gradients of <tangents, gradients> by q, k, v and dout, of a graph that is there; ours
alone and the operator attention_hvp alone, counted as 10 products of 2 D a visible pair, and the
whole of it beside torch's. Compared are ours, jvp_flash_attention's Triton kernels (of PyPI, where
it is installed) and torch's attention of plain operations (SDPBackend.MATH), which stores all
scores. 16,384 tokens, width 2,048, so heads by the head dim. Medians of turns of 100 ms; what is
compared is timed in one process.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.core.feature_tables import Column, Row, number, ratio, timing_of
from benchmarks.core.row_programs import fill, new_document, one_by_one, status_of
from benchmarks.core.runner import CACHE_MULTIPLE, MAX_INPUT_SETS, Call, Subject, measure
from benchmarks.core.turns import add_options, protocol_of
from benchmarks.peers.backends import Unsupported, require_ours

SCHEMA = 1
BENCHMARK = "second_order"
OURS, OPERATOR, TRITON, MATH = "ours", "attention_hvp", "jvp_flash_attention", "math"
ENTRANTS = {"jvp": (OURS, TRITON, MATH), "hvp": (OURS, OPERATOR, MATH)}
# Products of 2 D a visible pair, of which a forward has two.
PRODUCTS = {("jvp", OURS): 6, ("jvp", TRITON): 6, ("jvp", MATH): 6, ("hvp", OPERATOR): 10}

COLUMNS = (
    Column("problem", "group"),
    Column("what", "pass"),
    Column("of", "what"),
    Column("ms", "milliseconds", number(4)),
    Column("TFLOP/s", "tflops", number(4)),
    Column("ours /", "ours_over", ratio),
    Column("GiB", "peak_gibibytes", number(3)),
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, S, H, D)


@dataclass(frozen=True)
class Group:
    """Calls of one shape."""

    seqlen: int
    head_dim: int
    causal: bool
    device: str
    tokens: int = 16_384
    width: int = 2048
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"S{self.seqlen} d{self.head_dim} {'causal' if self.causal else 'full'}"

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        heads = max(1, self.width // self.head_dim)
        return max(1, self.tokens // self.seqlen), self.seqlen, heads, self.head_dim

    @property
    def product_flops(self) -> float:
        batch, seqlen, heads, head_dim = self.shape
        pairs = seqlen * (seqlen + 1) / 2 if self.causal else seqlen**2
        return 2.0 * batch * heads * head_dim * pairs

    def input_sets(self) -> list[list[Tensor]]:
        """q, k, v, dout and tangents of the first three; as many sets as defeat the cache."""
        generator = torch.Generator(self.device).manual_seed(0)
        count = 1
        if self.on_cuda:
            cache = torch.cuda.get_device_properties(self.device).L2_cache_size
            size = 7 * math.prod(self.shape) * self.dtype.itemsize
            count = min(MAX_INPUT_SETS, max(1, math.ceil(CACHE_MULTIPLE * cache / size)))
        empty = partial(torch.empty, self.shape, dtype=self.dtype, device=self.device)
        return [[empty().normal_(generator=generator) for _ in range(7)] for _ in range(count)]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", "--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="the first length alone")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=Group.tokens)
    parser.add_argument("--width", type=int, default=Group.width, help="heads times head dim")
    parser.add_argument("--passes", nargs="+", choices=list(ENTRANTS), default=list(ENTRANTS))
    parser.add_argument("--without", nargs="+", default=[], help="entrants that are left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.seqlens = options.seqlens[:1]
    return options


def groups(options: argparse.Namespace) -> list[Group]:
    shared = {"device": options.device, "tokens": options.tokens, "width": options.width}
    return [
        Group(seqlen, head_dim, causal, **shared)
        for head_dim, seqlen, causal in product(options.head_dims, options.seqlens, (False, True))
    ]


def attend_of(what: str, group: Group) -> Attend:
    if what == OURS:
        from flash_attn_cuda import flash_attn_func

        require_ours(torch.device(group.device).type)
        return partial(flash_attn_func, causal=group.causal)
    if what == TRITON:
        return triton_attention(group)

    def by_operations(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            heads_first = (x.transpose(1, 2) for x in tensors)
            return scaled_dot_product_attention(*heads_first, is_causal=group.causal)

    return by_operations


def triton_attention(group: Group) -> Attend:
    try:
        from jvp_flash_attention.jvp_attention import JVPAttn
    except ImportError as error:
        raise Unsupported(f"jvp_flash_attention is not installed: {error}") from error

    def attend(*tensors: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in tensors)
        result: Tensor = JVPAttn.fwd_dual(*heads_first, causal=group.causal)
        return result

    return attend


def jvp_calls(attend: Attend, inputs: Sequence[Sequence[Tensor]]) -> list[Call]:
    def call(q: Tensor, k: Tensor, v: Tensor, _: Tensor, *tangents: Tensor) -> Tensor:
        with torch.no_grad(), forward_ad.dual_level():
            duals = map(forward_ad.make_dual, (q, k, v), tangents)
            return forward_ad.unpack_dual(attend(*duals)).tangent

    return [partial(call, *one) for one in inputs]


def hvp_calls(attend: Attend, inputs: Sequence[Sequence[Tensor]]) -> list[Call]:
    """The second backward of a graph that is made here."""

    def prepared(*one: Tensor) -> Call:
        *leaves, dout = (x.clone().requires_grad_() for x in one[:4])
        out = attend(*leaves)
        weight = dout if out.shape == dout.shape else dout.transpose(1, 2)
        gradients = torch.autograd.grad(out, leaves, weight, create_graph=True)
        return partial(torch.autograd.grad, gradients, [*leaves, dout], one[4:], retain_graph=True)

    return [prepared(*one) for one in inputs]


def operator_calls(group: Group, inputs: Sequence[Sequence[Tensor]]) -> list[Call]:
    from flash_attn_cuda.call.fields import AttentionCall, Incoming, Tangents
    from flash_attn_cuda.operators import derivatives

    require_ours(torch.device(group.device).type)

    def prepared(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *tangents: Tensor) -> Call:
        call = AttentionCall(q, k, v, causal=group.causal)
        found = derivatives.run_operator(call)
        incoming = Incoming(dout, None, found.out, found.softmax_lse, None)
        direction = Tangents(*tangents)
        along = direction.with_results(derivatives.run_jvp_operator(call, incoming, direction))
        return partial(derivatives.run_hvp_operator, call, incoming, along)

    return [prepared(*one) for one in inputs]


def calls_of(group: Group, which: str, what: str, inputs: Sequence[Sequence[Tensor]]) -> list[Call]:
    if what == OPERATOR:
        return operator_calls(group, inputs)
    make = jvp_calls if which == "jvp" else hvp_calls
    return make(attend_of(what, group), inputs)


def measure_pass(group: Group, which: str, options: argparse.Namespace) -> Iterator[Row]:
    inputs = group.input_sets()
    entrants = [what for what in ENTRANTS[which] if what not in options.without]
    subjects = [Subject(what, partial(calls_of, group, which, what, inputs)) for what in entrants]
    measured = measure(
        subjects,
        records=which == "hvp",
        on_cuda=group.on_cuda,
        protocol=protocol_of(options),
    )
    ours = measured[entrants.index(OURS)].timing if OURS in entrants else None
    for what, measurement in zip(entrants, measured, strict=True):
        timing, products = measurement.timing, PRODUCTS.get((which, what))
        flops = None if products is None else products * group.product_flops
        peak = measurement.peak_bytes
        yield {
            "name": f"{group} {which} {what}",
            "group": str(group),
            "shape": list(group.shape),
            "causal": group.causal,
            "pass": which,
            "what": what,
            **timing_of(measurement),
            "peak_bytes": peak,
            "peak_gibibytes": None if peak is None else peak / 2**30,
            "milliseconds": timing and timing.median_ms,
            "tflops": timing and flops and flops / timing.median_ms / 1e9,
            "ours_over": timing and ours and what != OURS and timing.over(ours),
            "targets": [],
        }


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    program = "python -m benchmarks.suites.second_order"
    document = new_document(BENCHMARK, SCHEMA, program, arguments, options)
    problems = {
        f"{group} {which}": partial(measure_pass, group, which, options)
        for group, which in product(groups(options), options.passes)
    }
    return status_of(fill(document, one_by_one(problems), COLUMNS, options.out))


if __name__ == "__main__":
    sys.exit(main())
