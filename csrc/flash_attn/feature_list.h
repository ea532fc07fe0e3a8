// Run-time features beyond the mask, by bit: FEATURE(name, bit). The one list of them: config.h
// makes constants of it, host/names.h the names that errors print, and kernel_table/row.py
// reads it. Whoever includes it defines FEATURE before and undefines it after.
FEATURE(softcap, 0)
FEATURE(alibi, 1)
FEATURE(dropout, 2)
FEATURE(deterministic, 3)  // backward: dQ summed in a fixed order
FEATURE(paged_kv, 4)
FEATURE(split_kv, 5)        // a tile's keys shared by several CTAs
FEATURE(packed_gqa, 6)      // the query heads of a key head share a tile
FEATURE(block_sparse, 7)    // tiles visit what lists tell them to
FEATURE(bias, 8)            // a tensor is added to the scores
FEATURE(tangent, 9)         // the derivative of the results in a direction, and nothing else
FEATURE(e4m3_kv, 10)        // k and v of e4m3, times scales, and nothing else
FEATURE(latent, 11)         // scores also have qv v^T, and nothing else does
FEATURE(key_lists, 12)      // queries have lists of blocks of keys, and see nothing else
FEATURE(e4m3_products, 13)  // q is of e4m3 as k and v are, and multiplied so
