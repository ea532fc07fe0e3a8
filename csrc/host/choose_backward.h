// What a backward does where it has a choice: how many CTAs share a tile, and how dQ is summed. The
// window of `params` is a normalised one (host/normalize_window.h).
#pragma once

#include "flash_attn/instance.h"

namespace flash_attn_cuda {

// Whether more splits than the SMs ask for are faster: a causal mask has long and short tiles. On
// Hopper, where no order of additions is promised; lists were not timed.
bool splits_even_out_tiles(const BackwardParams& params, const BackwardConfig& config);

// How many CTAs share the query heads of one key head: as few as give every SM two CTAs, or as even
// out tiles. Each split costs an fp32 partial of dK and dV, and all partials together stay within
// the size of dQ in fp32, which most calls need as well. Partial sums cover whole sequences; rows
// of left padding belong to none.
int choose_dkdv_splits(const BackwardParams& params, const BackwardConfig& config,
                       std::int64_t key_tiles, const DeviceInfo& device);

// With lists of blocks, the entries that a CTA takes, whole steps of them; else 0. Throws Error
// where a tile of the kernel's does not hold a query's heads.
int choose_entries(const BackwardParams& params, const BackwardConfig& config,
                   const DeviceInfo& device);

// Whether a CTA takes all key tiles of a head, or of a short packed sequence: the plan's sweeps or
// table.swept_rows, and what follows of them. bytes_per_query: of Q, dO and the sum of dQ.
void choose_sweeps(const BackwardParams& params, std::int64_t bytes_per_query,
                   const DeviceInfo& device, BackwardPlan& plan);

// The few warps that finish dq beside the products keep up where a query sees enough keys; below, a
// kernel that follows is faster.
DqPath choose_dq_path(const BackwardParams& params, const BackwardPlan& plan);

// Tiles that CTAs share: with lists those of the first ranks, which may be long; else the last
// ones, where no order of dQ's additions or of dK's steps is promised. The host does not know the
// tiles of packed sequences.
SharedTiles choose_shared_tiles(const BackwardParams& params, const BackwardPlan& plan);

// dK and dV of a tile, and a part's counters: one for each warpgroup that holds them.
std::int64_t part_sums(const BackwardConfig& config);
int part_counters(const BackwardConfig& config);

}  // namespace flash_attn_cuda
