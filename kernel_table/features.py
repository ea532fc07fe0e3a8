"""Sets of features that rows of the kernel table have."""

from __future__ import annotations

from kernel_table.row import Feature

# A kernel is slower with a feature's code in it even where a call does not use it, so rows with
# features come behind those without (docs/kernels.md). Dropout draws for every tile, whether
# or not the scores are modified as well. What rows may spill: spill_allowances.json.
SOFTCAP, ALIBI, DROPOUT = Feature.softcap, Feature.alibi, Feature.dropout
ORDERED = Feature.deterministic
LISTS, BIAS = Feature.block_sparse, Feature.bias
OF_A_CACHE = Feature.paged_kv | Feature.split_kv
MODIFIERS = SOFTCAP | ALIBI
CACHE_MODIFIERS = MODIFIERS | OF_A_CACHE
LATENT = Feature.latent | SOFTCAP | OF_A_CACHE | Feature.packed_gqa
KEY_LISTS = Feature.key_lists | SOFTCAP
E4M3_LATENT = LATENT | Feature.e4m3_kv
E4M3_CACHE = OF_A_CACHE | Feature.e4m3_kv
E4M3_PRODUCTS = Feature.e4m3_kv | Feature.e4m3_products
# Lists of blocks, a bias, and whatever comes with them.
MASKED = MODIFIERS | DROPOUT | LISTS | BIAS
# Of sm80 up to head dim 256, also over pages; wide heads, and few queries, decode with a bias.
PAGED_MASKED = MASKED | Feature.paged_kv
