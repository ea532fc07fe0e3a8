// What kernels found wrong in device memory that no host check could see without a
// synchronisation. Kernels clamp or skip the entry, so that nothing outside a tensor is touched,
// and leave a record of the first one.
#pragma once

#include <cstdint>

namespace flash_attn_cuda {

enum class DeviceCheck : std::int32_t {
  none = 0,
  cu_seqlens_q,      // must start at 0, not decrease and end within total_q
  cu_seqlens_k,      // must start at 0, not decrease and end within total_k
  seqused_q,         // must be from 0 to the sequence's length
  seqused_k,         // must be from 0 to what the sequence or its cache holds
  leftpad_k,         // must be from 0 to the sequence's length
  cache_batch_idx,   // must be a batch entry of the cache
  block_table,       // must be a page of the pool
  append_capacity,   // cache_seqlens + new keys must fit the cache
  cu_seqlens_k_new,  // must start at 0, not decrease and end within total_k_new
  rotary_position,   // must be below seqlen_rotary
  origin,            // first_q and first_k must be multiples of 16, from 0 to 2^30
  key_lists,         // must be one of the sequence's keys, or, of blocks, a block of them or -1;
                     // index: the sequence
  tree_mask,         // must have a column for every query of a sequence, of which there are `value`
};

// It lies in device memory, zero at first. One per device, shared by all calls.
struct DeviceErrors {
  std::int32_t check;  // a DeviceCheck, none: nothing wrong so far
  std::int32_t index;  // of the entry within its array (sequence, or row of the block table)
  std::int32_t value;
  std::int32_t limit;  // the bound that the value breaks
};

}  // namespace flash_attn_cuda
