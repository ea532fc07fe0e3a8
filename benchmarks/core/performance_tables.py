"""What README, docs/performance.md and the results' README say of speed: text by name, made of the
files in benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import mean
from typing import TypeVar

from benchmarks.core.grid_tables import (
    OURS,
    Row,
    against_peers,
    speed_and_ratios,
    table_rows,
    three_digits,
)
from benchmarks.core.markdown import markdown_table
from benchmarks.core.result_files import (
    CARDS,
    PASSES,
    all_files,
    commit_of,
    least_to_most,
    load,
    mean_and_lowest,
    of_cards,
    only,
    ratios,
    rows_of,
    table,
    thousands,
)

# Names of backends, and of the figures that rows of packed sequences have of them.
PEERS = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "FlashAttention-2", "fa3": "FlashAttention-3"}
PACKED = {"sdpa_flash": "over_torch", "fa3": "over_fa3"}
DECODE = {"sdpa_flash": "torch flash", "fa3": "FlashAttention-3"}


Line, Column = TypeVar("Line"), TypeVar("Column")


def pivot(
    corner: str,
    columns: dict[str, Column],
    lines: dict[str, Line],
    cell: Callable[[Line, Column], str],
    *names: str,
) -> str:
    """A table with a cell for each of lines and columns, by their labels."""
    body = [[label, *(cell(line, x) for x in columns.values())] for label, line in lines.items()]
    return table([corner, *columns], body, *names)


def by_card(suite: str) -> dict[str, str]:
    """A suite's files by their card."""
    return {what: f"{card}_{suite}" for card, what in CARDS.items()}


def by_pass(suite: str) -> dict[str, tuple[str, str]]:
    """File and pass by card and pass."""
    return {f"{x} {which}": (name, which) for x, name in by_card(suite).items() for which in PASSES}


EACH_PASS = {which: which for which in PASSES}


# -- the grid --------------------------------------------------------------------------------------


def summary(card: str) -> str:
    """README's table: ours over each peer, by what is called."""
    lines: dict[str, Callable[[str], str]] = {
        **{which: partial(of_grid, f"{card}_{which}_sm90") for which in PASSES},
        **{f"packed, {which}": partial(of_packed, card, which) for which in PASSES},
        "decoding": partial(of_decoding, card),
    }
    suites = (*(f"{which}_sm90" for which in PASSES), "sm90_varlen", "decode")
    names = [f"{card}_{suite}" for suite in suites]
    peers = {what: peer for peer, what in PEERS.items()}
    corner = f"{CARDS[card]}: mean (lowest)"
    return pivot(corner, peers, lines, lambda of_what, peer: of_what(peer), *names)


def of_grid(name: str, peer: str, which: str | None = None) -> str:
    entries = against_peers(load(name))
    (entry,) = (x for x in entries if x["baseline"] == peer and which in (None, x["pass"]))
    return f"{entry['geomean_ratio']:.2f} ({entry['minimum_ratio']:.2f})"


def of_packed(card: str, which: str, peer: str) -> str:
    if peer not in PACKED:
        return ""
    rows = rows_of(f"{card}_sm90_varlen", what="packed", which=which)
    return mean_and_lowest(row[PACKED[peer]] for row in rows)


def of_decoding(card: str, peer: str) -> str:
    """Shares of bandwidth; a peer may lack a cache that we read."""
    rates = decode_rates(card)
    theirs = {group: rate for (group, what), rate in rates.items() if what == DECODE.get(peer)}
    return mean_and_lowest(rates[group, "dense"] / rate for group, rate in theirs.items() if rate)


def decode_rates(card: str) -> dict[tuple[str, str], float]:
    """TB/s by (shape, contender), 0 of one that did not run."""
    rows = rows_of(f"{card}_decode")
    return {(row["group"], row["what"]): row["terabytes_per_second"] or 0.0 for row in rows}


def grid(name: str, peers: Sequence[str] = tuple(PEERS)) -> str:
    """Our TFLOP/s and its ratios to the peers, a column for each length."""
    lengths, by_problem = table_rows(load(name))
    ours = {f"{key[2]} {key[3]}": key[:4] for key in by_problem if key[4] == OURS}

    def cell(problem: tuple, length: int) -> str:
        mine, *theirs = (by_problem.get((*problem, x), {}).get(length) for x in (OURS, *peers))
        return speed_and_ratios(mine, theirs).replace(" / ", "/")

    return pivot("D, mask", {thousands(x): x for x in lengths}, ours, cell, name)


def fa3_alone() -> str:
    def cell(head_dim: int, of: tuple[str, str]) -> str:
        rows = rows_of(*of, backend=OURS, head_dim=head_dim)
        return mean_and_lowest(row["ratio"] for row in rows if row["ratio"] is not None)

    columns, lines = by_pass("fa3_sm90"), {str(x): x for x in (64, 128, 256)}
    return pivot("D", columns, lines, cell, *of_cards("fa3_sm90"))


SHAPES = {
    "32 query heads, 8 of keys": "b4-q4096k4096-h32/8-d128-bf16-causal",
    "32 query heads, 1 of keys": "b4-q4096k4096-h32/1-d128-bf16-causal",
    "D = 96": "b4-q4096k4096-h16/16-d96-bf16-causal",
    "D = 192": "b4-q4096k4096-h16/16-d192-bf16-causal",
    "D = 192, values of 128": "b4-q4096k4096-h16/16-d192v128-bf16-causal",
    # Images.
    "256 x 128 tokens": "b256-q128k128-h16/16-d64-bf16-full",
    "256 x 197 tokens": "b256-q197k197-h12/12-d64-bf16-full",
    "128 x 257 tokens": "b128-q257k257-h12/12-d64-bf16-full",
    "32 x 577 tokens": "b32-q577k577-h12/12-d64-bf16-full",
}


def shapes() -> str:
    """Ours over the two peers that are nearest, forward and backward."""
    suites = [f"{which}_sm90_{suite}" for suite in ("shapes", "short") for which in PASSES]
    names = [name for suite in suites for name in of_cards(suite)]

    def cell(case: str, beside: tuple[str, str]) -> str:
        card, peer = beside
        found = [name for name in names if name.startswith(card)]
        return ratios(over(found, case, peer), "/")

    columns = {
        f"{CARDS[card]}: {PEERS[peer]}": (card, peer)
        for card in CARDS
        for peer in ("sdpa_cudnn", "fa3")
    }
    return pivot("", columns, SHAPES, cell, *names)


def over(names: Sequence[str], case: str, peer: str) -> Iterator[float | None]:
    """Ours over the peer, a value for each pass that was measured."""
    for which in PASSES:
        rows = [row for name in names for row in rows_of(name, which, case=case)]
        speeds = {row["backend"]: row["tflops"] for row in rows}
        if speeds.get(peer):
            yield speeds[OURS] / speeds[peer]


def wide_heads() -> str:
    """TFLOP/s, the ratios to peers, and memory that a call takes."""
    tables = {
        "h200_wide_heads": ("", ("ffpa", "sdpa_efficient")),
        "h200_wide_heads_sm80": ("sm80 kernels: ", ("sdpa_efficient",)),
    }
    lines = {}
    for name, (kernels, peers) in tables.items():
        for case in dict.fromkeys(row["case"] for row in rows_of(name)):
            heads, mask = case.split("-")[2].removeprefix("h"), case.rpartition("-")[2]
            lines[f"{kernels}{heads} heads, {mask}"] = (name, case, peers)
    return pivot("", EACH_PASS, lines, lambda line, which: wide_cell(*line, which), *tables)


def wide_cell(name: str, case: str, peers: Sequence[str], which: str) -> str:
    """609/1.25/5.20, 0.06 GiB; a peer that does not compute the case leaves a gap."""
    rows = {row["backend"]: row for row in rows_of(name, which, case=case)}
    ours = rows[OURS]
    speeds = (rows[peer]["tflops"] for peer in peers)
    over = "/".join(f"{ours['tflops'] / x:.2f}" if x else "-" for x in speeds)
    return f"{ours['tflops']:.0f}/{over}, {ours['peak_bytes'] / 2**30:.2f} GiB"


# -- other suites ----------------------------------------------------------------------------------


def packed() -> str:
    """Per card and pass: TFLOP/s, and the ratios to the peers."""

    def cell(shape: Row, of: tuple[str, str]) -> str:
        (row,) = rows_of(*of, **shape, what="packed")
        figures = (row["over_torch"], row["over_fa3"], row["over_dense"])
        return f"{three_digits(row['tflops'])}/{ratios(figures, '/')}"

    names = of_cards("sm90_varlen")
    lines = {
        f"{row['head_dim']}, {row['mean']}": {"head_dim": row["head_dim"], "mean": row["mean"]}
        for row in rows_of(names[0], what="packed", which="forward")
    }
    return pivot("D, mean", by_pass("sm90_varlen"), lines, cell, *names)


def decode() -> str:
    """Microseconds, TB/s, the ratios to torch's kernel and FlashAttention-3, and pages' shares."""

    def pages(card: str) -> str:
        rows = (row for row in rows_of(f"{card}_decode") if "paged" in row["what"])
        return least_to_most(row["over_dense"] for row in rows)

    def copy(card: str) -> str:
        return f"{only(f'{card}_decode', group='device copy')['terabytes_per_second']:.2f}"

    groups = [row["group"] for row in rows_of("h200_decode", what="dense")]
    lines = {group: partial(decode_cell, group) for group in groups}
    lines |= {"pages, of dense": pages, "a copy, TB/s": copy}
    cards = {what: card for card, what in CARDS.items()}
    names = of_cards("decode")
    return pivot("batch, keys", cards, lines, lambda of_what, card: of_what(card), *names)


def decode_cell(group: str, card: str) -> str:
    rates = decode_rates(card)
    if (group, "dense") not in rates:
        return ""
    ours = rates[group, "dense"]
    time = only(f"{card}_decode", group=group, what="dense")["microseconds"]
    theirs = [rates.get((group, peer)) for peer in DECODE.values()]
    shares = "/".join(f"{ours / rate:.2f}" if rate else "-" for rate in theirs)
    return f"{three_digits(time)}/{ours:.2f}/{shares}"


LATENT = {
    "us": lambda row: three_digits(row["microseconds"]),
    "TB/s": lambda row: f"{row['terabytes_per_second']:.2f}",
    "TFLOP/s": lambda row: f"{row['tflops']:.0f}",
    "/ FlashAttention-3": lambda row: "" if (ratio := row["over_fa3"]) is None else f"{ratio:.2f}",
}


def latent() -> str:
    """Time, rates and the speed beside FlashAttention-3's."""

    def shape_of(group: str) -> str:
        return group.replace(" heads", "").replace(", 1 queries", "")

    lines = {shape_of(row["group"]): row for row in rows_of("h200_latent", what="ours")}
    return pivot("heads, shape", LATENT, lines, lambda row, column: column(row), "h200_latent")


FEATURES = {
    "dropout 0.1": ("dropout 0.1",),
    "softcap 50": ("softcap 50",),
    "ALiBi": ("ALiBi",),
    "window of 1,024": ("window 1024,1024", "window 1024,0"),
    "deterministic": ("deterministic",),
}


def features() -> str:
    """What a feature leaves of the plain call's speed, full and causal, of one card and another."""
    names = of_cards("sm90_features")

    def cell(kinds: Sequence[str], of: tuple[str, int]) -> str:
        which, head_dim = of
        wanted = {"head_dim": head_dim, "seqlen": 4096, "which": which}
        rows = ([x for x in rows_of(name, **wanted) if x["what"] in kinds] for name in names)
        cells = (ratios((x["over_plain"] for x in of_card), "/") for of_card in rows)
        return ", ".join(filter(None, cells))

    columns = {f"{which}, {x}": (which, x) for which in PASSES for x in (64, 128, 256)}
    del columns["forward, 256"]
    return pivot(", ".join(CARDS.values()), columns, FEATURES, cell, *names)


def prefill() -> str:
    name = "h200_sm90_prefill"
    kinds = ("dense", "paged 256", "paged 64", "paged 16", "torch flash")
    groups = [row["group"] for row in rows_of(name, what="dense", head_dim=128)]

    def cell(group: str, what: str) -> str:
        return three_digits(only(name, group=group, what=what)["tflops"])

    lines = {group.removeprefix("d128 "): group for group in groups}
    return pivot("TFLOP/s", {what: what for what in kinds}, lines, cell, name)


def masks() -> str:
    """Time over that of dense attention, and FlexAttention's time over ours."""
    name = "h200_masks"

    def cell(density: float, of: tuple[str, str, int]) -> str:
        which, figure, digits = of
        rows = rows_of(name, what="block mask", density=density, which=which)
        return least_to_most((row[figure] for row in rows), digits)

    kinds = {"of dense": ("time_ratio", 3), "FlexAttention": ("speedup", 2)}
    columns = {f"{x}: {kind}": (x, *of) for x in PASSES for kind, of in kinds.items()}
    lines = {f"{density:g}": density for density in (0.5, 0.25, 0.1, 0.05)}
    return pivot("density", columns, lines, cell, name)


def beside_masks() -> str:
    """Documents, biases and sinks."""
    name = "h200_masks"
    causal = rows_of(name, part="document", what="causal mask")
    bias = rows_of(name, part="bias", what="bias")
    sinks = [row for row in rows_of(name, part="sink") if row["time_ratio"] is not None]
    lines = [
        ["32 documents as a mask, time of packed", ratios(row["time_ratio"] for row in causal)],
        ["a bias, torch's time", least_to_most(row["speedup"] for row in bias)],
        ["sinks, time of plain", least_to_most(row["time_ratio"] for row in sinks)],
    ]
    return table(["", "ratio"], lines, name)


HOST = {
    "flash_attn_cuda": "ours",
    "torch, this package activated": "sdpa_ours",
    "torch, flash": "sdpa_flash",
    "torch, cuDNN": "sdpa_cudnn",
}
MODES = ("inference", "recording", "training")


def host() -> str:
    """Microseconds forward, recorded for autograd, and with the backward."""

    def cell(backend: str, name: str) -> str:
        times = (only(name, backend=backend, mode=mode)["median_us"] for mode in MODES)
        return "/".join(map(three_digits, times))

    return pivot("us", by_card("host_overhead"), HOST, cell, *of_cards("host_overhead"))


def rotary() -> str:
    name = "h200_rotary"

    def cell(what: str, which: str) -> str:
        return least_to_most(row["over_copy"] for row in rows_of(name, which, what=what))

    columns = {which: which for which in ("forward", "in place", "backward")}
    lines = {what: what for what in ("ours", "torch.compile", "torch operators")}
    return pivot("share of a copy's speed", columns, lines, cell, name)


def sdpa() -> str:
    """The speed of SDPA with this package activated, as a share of our own call's."""

    def cell(length: int, name: str) -> str:
        rows = rows_of(name, backend="sdpa_ours", seqlen_q=length)
        return ratios((row["ratio"] for row in rows), "/")

    lines = {thousands(length): length for length in (1024, 4096, 16384)}
    return pivot("S", by_card("sdpa"), lines, cell, *of_cards("sdpa"))


TRAINED = {
    "ours": "flash_attn_cuda",
    "sdpa-ours": "torch, this package activated",
    "sdpa-cudnn": "torch, cuDNN",
    "sdpa-flash": "torch, flash",
}


def train() -> str:
    name = "h200_train_350m"
    rows = {what: only(name, attention=attention) for attention, what in TRAINED.items()}
    lines = [
        [what, tokens(row), f"{row['peak_gib']:.1f}", f"{row['train_losses'][-1]:.4f}"]
        for what, row in rows.items()
    ]
    return table(["", "tokens/s", "GiB", "last loss"], lines, name)


def tokens(row: Row) -> str:
    """A second."""
    return f"{round(mean(row['tokens_per_second']), -2):,.0f}"


def gemma() -> str:
    """Training of a model with Gemma 4's layers."""
    name = "h200_gemma"
    speeds = {row["attention"]: mean(row["tokens_per_second"]) for row in rows_of(name)}
    over = {x: f"{speeds['ours'] / speed:.2f}" for x, speed in speeds.items() if x != "ours"}
    lines = [
        [row["attention"], tokens(row), over.get(row["attention"], ""), f"{row['peak_gib']:.1f}"]
        for row in rows_of(name)
    ]
    return table(["attention", "tokens/s", "ours over it", "GiB"], lines, name)


SCHEMES = ("all_gather", "ring", "ulysses", "ring-flash-attention", "torch")


def context_parallel() -> str:
    """Efficiency on two GPUs, forward and backward; of what both files have, from the second."""
    names = ("h100x2_context_parallel", "h100x2_context_parallel_long")

    def cell(of: tuple[str, str], scheme: str) -> str:
        name, group = of
        return ratios((x["efficiency"] for x in rows_of(name, group=group, scheme=scheme)), "/")

    lines = {}
    for name in names:
        for group in dict.fromkeys(row["group"] for row in rows_of(name)):
            length, *documents = (int(x) for x in group[1:].split(" documents of "))
            lines[" in ".join(map(thousands, (length, *documents)))] = (name, group)
    return pivot("tokens", {scheme: scheme for scheme in SCHEMES}, lines, cell, *names)


def joules() -> str:
    """Of a call, and as a share of FlashAttention-3's."""

    def cell(of: tuple[str, bool], name: str) -> str:
        which, causal = of
        rows = rows_of(name, which, causal=causal)
        joules = {row["backend"]: row["joules_per_call"] for row in rows}
        return f"{joules[OURS]:.3g}/{joules[OURS] / joules['fa3']:.2f}"

    kinds = {"full": False, "causal": True}
    lines = {f"{which}, {mask}": (which, x) for which in PASSES for mask, x in kinds.items()}
    return pivot("J, share", by_card("sm90_joules"), lines, cell, *of_cards("sm90_joules"))


def limits() -> str:
    """Ours over a large matrix product's speed, in the same turns."""

    def cell(of: tuple[str, int], name: str) -> str:
        which, head_dim = of
        rows = rows_of(name, which, what=OURS, head_dim=head_dim)
        return ratios(row["over_matmul"] for row in rows)

    names = of_cards("sm90_limits")
    problems = [(row["pass"], row["head_dim"]) for row in rows_of(names[0])]
    lines = {f"{which}, {head_dim}": (which, head_dim) for which, head_dim in problems}
    return pivot("pass, D", by_card("sm90_limits"), lines, cell, *names)


def sm80() -> str:
    name = "h200_sm80"
    lines = {"over FlashAttention-2": "sdpa_flash"}
    return pivot("mean (lowest)", EACH_PASS, lines, partial(of_grid, name), name)


# -- what was measured -----------------------------------------------------------------------------

SUITES = {
    "forward_sm90": "the forward's grid beside three peers",
    "backward_sm90": "the backward's grid",
    "fa3_sm90": "both grids beside FlashAttention-3 alone",
    "forward_sm90_shapes": "grouped heads and other head dims, forward",
    "backward_sm90_shapes": "the same, backward",
    "backward_sm90_shared_heads": "heads that share keys beside FlashAttention-3, backward",
    "forward_sm90_short": "image models' lengths, forward",
    "backward_sm90_short": "the same, backward",
    "forward_sm90_fp16": "the forward in fp16, D = 128",
    "sm90_varlen": "packed sequences, and one in chunks",
    "decode": "one query a sequence over a KV cache",
    "latent": "absorbed latent attention over pages beside FlashAttention-3",
    "sm90_prefill": "prompts in chunks over a cache",
    "sm90_features": "what each feature costs",
    "masks": "block masks, documents, biases, sinks",
    "lists": "lists of key blocks of each query beside causal attention",
    "sm90_limits": "long calls beside a matrix product",
    "sm90_joules": "energy of a call",
    "rotary": "rotary embedding",
    "sdpa": "torch's SDPA with this package activated",
    "host_overhead": "host time of a call",
    "train_350m": "training of the example's GPT; losses by context parallelism",
    "sm80": "the grid of the sm80 kernels",
    "wide_heads": "head dims above 256 beside ffpa-attn and torch's memory-efficient attention",
    "wide_heads_sm80": "the same on the sm80 kernels",
    "decode_wide": "caches of head dim 512 beside others, without FlashAttention-3",
    "gemma": "training of a model with Gemma 4's layers",
    "second_order": "forward mode and double backward",
    "accuracy": "errors where keys and values have a mean",
    "accuracy_sm80": "the same on the sm80 kernels",
    "rounding": "what keeping the rounding of O costs",
    "key_bias": "training with biases of keys and values",
    "fp8_cache": "caches of FP8 beside those of 16 bits",
    "context_parallel": "context parallelism beside one GPU",
    "context_parallel_long": "the same from 128k tokens on",
    "context_parallel_sdpa": "torch's own, this package activated",
    "context_parallel_errors": "its errors against fp64",
}


def files() -> str:
    """The results by suite, with the commit of each."""
    of_suite: dict[str, list[str]] = {suite: [] for suite in SUITES}
    for path in reversed(all_files()):
        _, _, suite = path.stem.partition("_")
        commit = f" ({commit_of(path.stem)})" if path.suffix == ".json" else ""
        of_suite[suite].append(f"`{path.name}`{commit}")
    lines = [[SUITES[suite], ", ".join(names)] for suite, names in of_suite.items() if names]
    header = ["what", "files (commits)"]
    return markdown_table(header, lines, header)


SOFTWARE = {"torch": "torch", "cudnn": "cuDNN", "driver": "driver"}


def software() -> str:
    """With which the results were measured, all of them."""
    environments = [
        load(path.stem)["environment"] for path in all_files() if path.suffix == ".json"
    ]
    facts = (
        f"{what} {' and '.join(str(x) for x in dict.fromkeys(e[key] for e in environments))}"
        for key, what in SOFTWARE.items()
    )
    return f"All with {', '.join(facts)}."


TEXTS: dict[str, Callable[[], str]] = {
    **{f"speed {card}": partial(summary, card) for card in CARDS},
    **{
        f"grid {card} {which}": partial(grid, f"{card}_{which}_sm90")
        for card in CARDS
        for which in PASSES
    },
    "grid fp16": partial(grid, "h200_forward_sm90_fp16", ("sdpa_cudnn", "sdpa_flash")),
    "fa3": fa3_alone,
    "shapes": shapes,
    "packed": packed,
    "decode": decode,
    "latent": latent,
    "features": features,
    "prefill": prefill,
    "masks": masks,
    "documents": beside_masks,
    "host": host,
    "rotary": rotary,
    "sdpa": sdpa,
    "train": train,
    "wide heads": wide_heads,
    "gemma": gemma,
    "context parallel": context_parallel,
    "joules": joules,
    "limits": limits,
    "sm80": sm80,
    "files": files,
    "software": software,
}
