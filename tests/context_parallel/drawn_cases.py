"""Cases of context parallelism as hypothesis draws them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.context_parallel.cases import Case

HEAD_DIMS = ((8, 8), (12, 4), (4, 12))
OF_DROPOUT = 16  # documents and parts of a zigzag are cut at multiples of it


@st.composite
def any_case(
    draw: st.DrawFn,
    ranks: int,
    head_dims: tuple[tuple[int, int], ...] = HEAD_DIMS,
    longest: int = 120,
    **fields: Any,
) -> Case:
    """Of so many ranks, a power of two; longest: of documents. fields: of all cases."""
    scheme = draw(st.sampled_from(["ring", "all_gather", "ulysses", "ulysses+ring", "auto"]))
    fields["heads_k"] = draw(st.sampled_from([ranks, 2 * ranks]))
    fields["heads_q"] = fields["heads_k"] * draw(st.integers(1, 3))
    fields["head_dim"], fields["head_dim_v"] = draw(st.sampled_from(head_dims))
    if scheme == "ulysses+ring":
        sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
        fields["ulysses_size"] = draw(st.sampled_from(sizes))
    if scheme == "all_gather":
        fields["head_groups"] = draw(st.sampled_from([None, 2, ranks]))
    fields["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 0.0, 0.3]))
    if draw(st.booleans()):
        lengths = st.lists(st.integers(0, longest), min_size=1, max_size=9)
        fields["lengths"], fields["batch"] = tuple(draw(lengths)), None
    else:
        part = 2 * ranks * (OF_DROPOUT if fields["dropout_p"] else 1)
        fields["lengths"] = (part * draw(st.integers(0, max(1, longest // part))),)
        fields["batch"] = draw(st.integers(0, 3))
    bound = st.sampled_from([-1, -1, 0, 3, 17, longest // 2])
    fields["window_size"] = draw(bound), draw(bound)
    fields["softcap"] = draw(st.sampled_from([0.0, 0.0, 2.0]))
    for name in ("causal", "has_alibi", "has_sink", "max_logits"):
        fields[name] = draw(st.booleans())
    return Case(scheme, ranks, **fields)
