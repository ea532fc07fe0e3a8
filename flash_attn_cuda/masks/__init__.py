"""Ready-made masks, each a BlockSparsity: for `block_mask` of an attention call; and choices of
blocks of keys by each query, for `key_lists`.

A query i stands at position i + seqlen_k - seqlen_q among the keys, as causal masks and windows
have it (docs/notation.md): the last query and the last key stand at the same position. seqlen_k is
that of the queries by default. `device`: where the mask is made, torch's default device otherwise;
of a mask that is made of a tensor, that tensor's. Nothing here waits for the device.

Make a mask once and keep it, not in every layer. Where the call itself is causal, the mask need not
be: causal=True of the call hides the same pairs, and a mask in blocks then has no bits.

    ready_made     masks that are the same whatever queries and keys
    selection      lists of the blocks of keys that queries choose
    sparsity       BlockSparsity, which every mask becomes
    lists, plot    what it holds, and a picture of it
"""

from .ready_made import bigbird, dilated, document, prefix_lm, sliding_window, strided
from .selection import moba_key_lists, nsa_key_lists

__all__ = [
    "bigbird",
    "dilated",
    "document",
    "moba_key_lists",
    "nsa_key_lists",
    "prefix_lm",
    "sliding_window",
    "strided",
]
