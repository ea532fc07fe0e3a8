"""What README, docs/performance.md and the results' README say of speed: text by name, made of the
files in benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import mean

from benchmarks.core.grid_tables import (
    OURS,
    Row,
    against_peers,
    speed_and_ratios,
    table_rows,
    three_digits,
)
from benchmarks.core.result_files import (
    CARDS,
    PASSES,
    all_files,
    commit_of,
    compact,
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


# -- the grid --------------------------------------------------------------------------------------


def summary(card: str) -> str:
    """README's table: ours over each peer, by what is called."""
    names = [f"{card}_{suite}" for suite in (*(f"{x}_sm90" for x in PASSES), "sm90_varlen")]
    header = [f"{CARDS[card]}: mean (lowest)", *PEERS.values()]
    lines = [[which, *of_grid(f"{card}_{which}_sm90")] for which in PASSES]
    lines += [[f"packed, {which}", *of_packed(card, which)] for which in PASSES]
    lines.append(["decoding", *of_decoding(card)])
    return table(header, lines, *names, f"{card}_decode")


def of_grid(name: str) -> list[str]:
    entries = {entry["baseline"]: entry for entry in against_peers(load(name))}
    return [
        f"{entries[peer]['geomean_ratio']:.2f} ({entries[peer]['minimum_ratio']:.2f})"
        for peer in PEERS
    ]


def of_packed(card: str, which: str) -> list[str]:
    rows = rows_of(f"{card}_sm90_varlen", what="packed", which=which)
    return [
        mean_and_lowest(row[PACKED[peer]] for row in rows) if peer in PACKED else ""
        for peer in PEERS
    ]


def of_decoding(card: str) -> list[str]:
    """Shares of bandwidth; a peer may lack a cache that we read."""
    rates = decode_rates(card)
    ours = [key for key, what in rates if what == "dense"]
    return [
        mean_and_lowest(
            rates[key, "dense"] / rates[key, DECODE[peer]]
            for key in ours
            if rates.get((key, DECODE[peer]))
        )
        if peer in DECODE
        else ""
        for peer in PEERS
    ]


def decode_rates(card: str) -> dict[tuple[str, str], float | None]:
    """TB/s by (shape, contender)."""
    rows = rows_of(f"{card}_decode")
    return {(row["group"], row["what"]): row["terabytes_per_second"] for row in rows}


def grid(name: str, peers: Sequence[str] = tuple(PEERS)) -> str:
    """Our TFLOP/s and its ratios to the peers, a column for each length."""
    lengths, by_problem = table_rows(load(name))
    lines = []
    for (*problem, backend), ours in by_problem.items():
        if backend == OURS:
            theirs = [by_problem.get((*problem, peer), {}) for peer in peers]
            cells = (
                speed_and_ratios(ours.get(length), [rows.get(length) for rows in theirs])
                for length in lengths
            )
            _, _, head_dims, mask = problem
            lines.append([f"{head_dims} {mask}", *(cell.replace(" / ", "/") for cell in cells)])
    return table(["D, mask", *map(thousands, lengths)], lines, name)


def fa3_alone() -> str:
    names = of_cards("fa3_sm90")
    lines = []
    for head_dim in (64, 128, 256):
        cells = [
            mean_and_lowest(
                row["ratio"]
                for row in rows_of(name, backend=OURS, head_dim=head_dim, which=which)
                if row["ratio"] is not None
            )
            for name in names
            for which in PASSES
        ]
        lines.append([str(head_dim), *cells])
    header = ["D", *(f"{card} {which}" for card in CARDS.values() for which in PASSES)]
    return table(header, lines, *names)


SHAPES = {
    "32 query heads, 8 of keys": "b4-q4096k4096-h32/8-d128-bf16-causal",
    "32 query heads, 1 of keys": "b4-q4096k4096-h32/1-d128-bf16-causal",
    "D = 96": "b4-q4096k4096-h16/16-d96-bf16-causal",
    "D = 192": "b4-q4096k4096-h16/16-d192-bf16-causal",
    "D = 192, values of 128": "b4-q4096k4096-h16/16-d192v128-bf16-causal",
}
IMAGES = {
    "256 x 128 tokens": "b256-q128k128-h16/16-d64-bf16-full",
    "256 x 197 tokens": "b256-q197k197-h12/12-d64-bf16-full",
    "128 x 257 tokens": "b128-q257k257-h12/12-d64-bf16-full",
    "32 x 577 tokens": "b32-q577k577-h12/12-d64-bf16-full",
}


def shapes() -> str:
    """Ours over the two peers that are nearest, forward and backward."""
    peers = ("sdpa_cudnn", "fa3")
    suites = [f"{which}_sm90_{suite}" for suite in ("shapes", "short") for which in PASSES]
    names = [name for suite in suites for name in of_cards(suite)]
    lines = [
        [what, *(ratios(over(names, case, card, peer), "/") for card in CARDS for peer in peers)]
        for what, case in {**SHAPES, **IMAGES}.items()
    ]
    header = ["", *(f"{card}: {PEERS[peer]}" for card in CARDS.values() for peer in peers)]
    return table(header, lines, *names)


def over(names: Sequence[str], case: str, card: str, peer: str) -> Iterator[float | None]:
    """Ours over the peer, a value for each pass that was measured."""
    for which in PASSES:
        wanted = {"case": case, "which": which}
        rows = [row for name in names if name.startswith(card) for row in rows_of(name, **wanted)]
        speeds = {row["backend"]: row["tflops"] for row in rows}
        if speeds.get(peer):
            yield speeds[OURS] / speeds[peer]


def wide_heads() -> str:
    """TFLOP/s, the ratios to peers, and memory that a call takes."""
    tables = {
        "h200_wide_heads": ("", ("ffpa", "sdpa_efficient")),
        "h200_wide_heads_sm80": ("sm80 kernels: ", ("sdpa_efficient",)),
    }
    lines = []
    for name, (kernels, peers) in tables.items():
        for case in dict.fromkeys(row["case"] for row in rows_of(name)):
            heads, mask = case.split("-")[2].removeprefix("h"), case.rpartition("-")[2]
            cells = (wide_cell(name, case, which, peers) for which in PASSES)
            lines.append([f"{kernels}{heads} heads, {mask}", *cells])
    return table(["", *PASSES], lines, *tables)


def wide_cell(name: str, case: str, which: str, peers: Sequence[str]) -> str:
    """609/1.25/5.20, 0.06 GiB; a peer that does not compute the case leaves a gap."""
    rows = {row["backend"]: row for row in rows_of(name, which, case=case)}
    ours = rows[OURS]
    speeds = (rows[peer]["tflops"] for peer in peers)
    over = "/".join(f"{ours['tflops'] / x:.2f}" if x else "-" for x in speeds)
    return f"{ours['tflops']:.0f}/{over}, {ours['peak_bytes'] / 2**30:.2f} GiB"


# -- other suites ----------------------------------------------------------------------------------


def packed() -> str:
    """Per card and pass: TFLOP/s, and the ratios to the peers."""
    names = of_cards("sm90_varlen")
    lines = []
    for row in rows_of(names[0], what="packed", which="forward"):
        shape = {"head_dim": row["head_dim"], "mean": row["mean"], "what": "packed"}
        cells = [
            packed_cell(only(name, **shape, which=which)) for name in names for which in PASSES
        ]
        lines.append([f"{row['head_dim']}, {row['mean']}", *cells])
    header = ["D, mean", *(f"{card} {which}" for card in CARDS.values() for which in PASSES)]
    return table(header, lines, *names)


def packed_cell(row: Row) -> str:
    figures = (row["over_torch"], row["over_fa3"], row["over_dense"])
    return f"{three_digits(row['tflops'])}/{ratios(figures, '/')}"


def decode() -> str:
    """Microseconds, TB/s, the ratios to torch's kernel and FlashAttention-3, and pages' shares."""
    lines = [
        [row["group"], *(decode_cell(card, row["group"]) for card in CARDS)]
        for row in rows_of("h200_decode", what="dense")
    ]
    pages = [
        least_to_most(row["over_dense"] for row in rows_of(name) if "paged" in row["what"])
        for name in of_cards("decode")
    ]
    copies = (row for name in of_cards("decode") for row in rows_of(name, group="device copy"))
    lines.append(["pages, of dense", *pages])
    lines.append(["a copy, TB/s", *(f"{row['terabytes_per_second']:.2f}" for row in copies)])
    return table(["batch, keys", *CARDS.values()], lines, *of_cards("decode"))


def decode_cell(card: str, group: str) -> str:
    rates = decode_rates(card)
    if (group, "dense") not in rates:
        return ""
    ours = rates[group, "dense"] or 0.0
    time = only(f"{card}_decode", group=group, what="dense")["microseconds"]
    theirs = [rates.get((group, peer)) for peer in DECODE.values()]
    shares = "/".join(f"{ours / rate:.2f}" if rate else "-" for rate in theirs)
    return f"{three_digits(time)}/{ours:.2f}/{shares}"


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
    columns = [(which, head_dim) for which in PASSES for head_dim in (64, 128, 256)]
    columns.remove(("forward", 256))
    lines = []
    for what, kinds in FEATURES.items():
        cells = [
            [ratios(shares(name, kinds, *column), "/") for name in names] for column in columns
        ]
        lines.append([what, *(", ".join(filter(None, cell)) for cell in cells)])
    header = [", ".join(CARDS.values()), *(f"{which}, {x}" for which, x in columns)]
    return table(header, lines, *names)


def shares(name: str, kinds: Sequence[str], which: str, head_dim: int) -> list[float]:
    rows = rows_of(name, head_dim=head_dim, seqlen=4096, which=which)
    return [row["over_plain"] for row in rows if row["what"] in kinds]


def prefill() -> str:
    name = "h200_sm90_prefill"
    kinds = ("dense", "paged 256", "paged 64", "paged 16", "torch flash")
    lines = []
    for row in rows_of(name, what="dense", head_dim=128):
        speeds = (three_digits(only(name, group=row["group"], what=x)["tflops"]) for x in kinds)
        lines.append([row["group"].removeprefix("d128 "), *speeds])
    return table(["TFLOP/s", *kinds], lines, name)


def masks() -> str:
    """Time over that of dense attention, and FlexAttention's time over ours."""
    name = "h200_masks"
    lines = []
    for density in (0.5, 0.25, 0.1, 0.05):
        cells = []
        for which in PASSES:
            rows = rows_of(name, what="block mask", density=density, which=which)
            cells.append(least_to_most((row["time_ratio"] for row in rows), 3))
            cells.append(least_to_most(row["speedup"] for row in rows))
        lines.append([f"{density:g}", *cells])
    kinds = ("of dense", "FlexAttention")
    header = ["density", *(f"{which}: {kind}" for which in PASSES for kind in kinds)]
    return table(header, lines, name)


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
    "ours": "flash_attn_cuda",
    "sdpa_ours": "torch, this package activated",
    "sdpa_flash": "torch, flash",
    "sdpa_cudnn": "torch, cuDNN",
}
MODES = ("inference", "recording", "training")


def host() -> str:
    """Microseconds forward, recorded for autograd, and with the backward."""
    names = of_cards("host_overhead")
    lines = [
        [what, *(host_times(name, backend) for name in names)] for backend, what in HOST.items()
    ]
    return table(["us", *CARDS.values()], lines, *names)


def host_times(name: str, backend: str) -> str:
    times = (only(name, backend=backend, mode=mode)["median_us"] for mode in MODES)
    return "/".join(map(three_digits, times))


def rotary() -> str:
    name = "h200_rotary"
    lines = [
        [what, *(least_to_most(of_copies(name, what, which)) for which in ROTARY_PASSES)]
        for what in ("ours", "torch.compile", "torch operators")
    ]
    return table(["share of a copy's speed", *ROTARY_PASSES], lines, name)


ROTARY_PASSES = ("forward", "in place", "backward")


def of_copies(name: str, what: str, which: str) -> list[float]:
    return [row["over_copy"] for row in rows_of(name, what=what, which=which)]


def sdpa() -> str:
    """The speed of SDPA with this package activated, as a share of our own call's."""
    names = of_cards("sdpa")
    lines = []
    for length in (1024, 4096, 16384):
        wanted = {"backend": "sdpa_ours", "seqlen_q": length}
        cells = (ratios((row["ratio"] for row in rows_of(name, **wanted)), "/") for name in names)
        lines.append([thousands(length), *cells])
    return table(["S", *CARDS.values()], lines, *names)


TRAINED = {
    "ours": "flash_attn_cuda",
    "sdpa-ours": "torch, this package activated",
    "sdpa-cudnn": "torch, cuDNN",
    "sdpa-flash": "torch, flash",
}


def train() -> str:
    name = "h200_train_350m"
    lines = []
    for attention, what in TRAINED.items():
        row = only(name, attention=attention)
        speed = f"{round(mean(row['tokens_per_second']), -2):,.0f}"
        memory = f"{row['peak_gib']:.1f}"
        lines.append([what, speed, memory, f"{row['train_losses'][-1]:.4f}"])
    return table(["", "tokens/s", "GiB", "last loss"], lines, name)


def gemma() -> str:
    """Training of a model with Gemma 4's layers."""
    name = "h200_gemma"
    rows = rows_of(name)
    ours = mean(only(name, attention="ours")["tokens_per_second"])
    lines = []
    for row in rows:
        speed = mean(row["tokens_per_second"])
        ratio = "" if row["attention"] == "ours" else f"{ours / speed:.2f}"
        lines.append(
            [row["attention"], f"{round(speed, -2):,.0f}", ratio, f"{row['peak_gib']:.1f}"]
        )
    return table(["attention", "tokens/s", "ours over it", "GiB"], lines, name)


SCHEMES = ("all_gather", "ring", "ulysses", "ring-flash-attention", "torch")
LONG = "h100x2_context_parallel_long"


def context_parallel() -> str:
    """Efficiency on two GPUs, forward and backward."""
    name = "h100x2_context_parallel"
    of_problem: dict[str, str] = {row["group"]: name for row in rows_of(name)}
    of_problem |= {row["group"]: LONG for row in rows_of(LONG)}
    lines = []
    for group, file in of_problem.items():
        cells = [
            ratios((row["efficiency"] for row in rows_of(file, group=group, scheme=x)), "/")
            for x in SCHEMES
        ]
        length, _, documents = group.partition(" documents of ")
        what = thousands(int(length[1:]))
        lines.append([f"{what} in {thousands(int(documents))}" if documents else what, *cells])
    return table(["tokens", *SCHEMES], lines, name, LONG)


def joules() -> str:
    """Of a call, and as a share of FlashAttention-3's."""
    names = of_cards("sm90_joules")
    lines = [
        [f"{which}, {mask}", *(energy(name, which, mask == "causal") for name in names)]
        for which in PASSES
        for mask in ("full", "causal")
    ]
    return table(["J, share", *CARDS.values()], lines, *names)


def energy(name: str, which: str, causal: bool) -> str:
    rows = rows_of(name, causal=causal, which=which)
    joules = {row["backend"]: row["joules_per_call"] for row in rows}
    return f"{joules[OURS]:.3g}/{joules[OURS] / joules['fa3']:.2f}"


def limits() -> str:
    """Ours over a large matrix product's speed, in the same turns."""
    names = of_cards("sm90_limits")
    problems = dict.fromkeys((row["pass"], row["head_dim"]) for row in rows_of(names[0]))
    lines = []
    for which, head_dim in problems:
        wanted = {"what": OURS, "head_dim": head_dim, "which": which}
        cells = (ratios(row["over_matmul"] for row in rows_of(name, **wanted)) for name in names)
        lines.append([f"{which}, {head_dim}", *cells])
    return table(["pass, D", *CARDS.values()], lines, *names)


def sm80() -> str:
    name = "h200_sm80"
    entries = {entry["pass"]: entry for entry in against_peers(load(name))}
    cells = [
        f"{entries[which]['geomean_ratio']:.2f} ({entries[which]['minimum_ratio']:.2f})"
        for which in PASSES
    ]
    return table(["mean (lowest)", *PASSES], [["over FlashAttention-2", *cells]], name)


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
    "sm90_prefill": "prompts in chunks over a cache",
    "sm90_features": "what each feature costs",
    "masks": "block masks, documents, biases, sinks",
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
    lines = [[SUITES[suite], ", ".join(names)] for suite, names in of_suite.items()]
    return compact([["what", "files (commits)"], ["---", "---"], *lines])


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
