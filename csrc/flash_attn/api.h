// The kernel library's interface: plan a call on the host, then run the plan on a stream. Knows no
// framework, never synchronises, never allocates; throws flash_attn_cuda::Error and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "flash_attn/config.h"
#include "flash_attn/params.h"

struct CUstream_st;

namespace flash_attn_cuda {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct DeviceInfo {
  int compute_capability = 0;  // 80, 90, ...
  int num_sms = 0;
  int smem_per_block = 0;  // bytes, opt-in limit
  std::int64_t l2_bytes = 0;
};

// Queried once per device, then served from a table.
const DeviceInfo& device_info(int device);

// How tiles map to the one-dimensional grid. Heads are taken in sections, as what their tiles read
// more than once is to stay in L2; inside a section the longest tiles of every head come first, so
// that a masked grid ends on short tiles.
struct TileSchedule {
  int num_tiles = 0;        // tiles per (batch, head)
  int num_heads = 0;        // heads per batch of this grid
  int num_batch_heads = 0;  // batch * heads
  int heads_per_section = 1;
  bool longest_first = false;  // tile index runs down instead of up
  int least_last_heads = 1;    // of the last section, or more

  constexpr std::int64_t grid_size() const { return std::int64_t{num_tiles} * num_batch_heads; }
};

struct ForwardInstance;
struct BackwardInstance;

// Packed sequences are read from a table that a small kernel makes of cu_seqlens before the main
// one: checked bounds of every sequence, and the list of tiles, the costliest first
// (auxiliary/sequence_table.cu). Grids are upper bounds; what is beyond the list has no work.
struct SequenceTablePlan {
  bool used = false;
  int max_tiles = 0;           // entries of the tile list
  int tile_rows = 0;           // rows of a tile of that list
  int rows_per_query = 1;      // rows that a query stands for: its heads, where they share a tile
  bool tiles_descend = false;  // a sequence's last tile comes first
  int q_tile_rows = 0;         // backward: rows of a query tile
  int max_q_tiles = 0;         // backward: query tiles of all sequences, entries of the second list
  int swept_rows = 0;          // sm90 backward: sequences of at most so many rows of queries and of
                               // keys have one entry, and who draws it takes all their tiles
  std::size_t offset = 0;      // into the workspace
};

struct ForwardPlan {
  const ForwardInstance* instance = nullptr;
  TileSchedule schedule;
  SequenceTablePlan table;
  int num_ctas = 0;        // sm90: CTAs that stay and walk the tiles, ctas_per_sm an SM
  int num_splits = 1;      // CTAs that share the keys of a tile, at most
  int keys_per_split = 0;  // fixed length of a split, in keys; 0: what the lengths ask for
  std::size_t out_partial_offset = 0;
  std::size_t lse_partial_offset = 0;
  std::size_t arrivals_offset = 0;  // of decode kernels, which combine splits themselves
  bool draws_tiles = false;         // sm90: CTAs take the next tile that nobody has drawn, and
  std::size_t tickets_offset = 0;   // count those here, in a word that nobody has zeroed
  std::size_t workspace_bytes = 0;
};

// How dQ, to which every key tile of a sequence adds, becomes dq.
enum class DqPath : std::uint8_t {
  converted,  // a kernel that follows turns fp32 sums into dq
  finished,   // idle warps of the main kernel do, while it runs, and what is left then follows
  ordered,    // key tiles add one after the other: the first stores its part, the last writes dq
  direct      // a sequence has one key tile, which writes dq; there are no sums
};

// sm90 backward: key tiles that several CTAs share (shared/schedule/tile_parts.h), `count` from
// number `first` on in the order in which they are drawn.
struct SharedTiles {
  int first = 0;
  int count = 0;
  int parts = 1;  // of a tile, at most

  std::int64_t places() const { return static_cast<std::int64_t>(count) * parts; }
  std::int64_t more_tickets() const { return places() - count; }
};

// The backward runs as [sequence table ->] preprocess [-> sum of dsink, sm80] -> main [-> convert]
// [-> reduce]. Offsets are bytes into the workspace.
struct BackwardPlan {
  const BackwardInstance* instance = nullptr;
  TileSchedule schedule;  // tiles are key blocks; heads are key heads times dkdv_splits
  SequenceTablePlan table;
  int q_tiles = 0;  // query tiles per head, of all sequences together: the statistics of head h,
                    // tile t lie at index h * q_tiles + t, and so do sums of dQ, unless sweeps
  bool tiles_descend = false;  // a sequence's last key tile comes first
  int num_ctas = 0;            // sm90: CTAs that draw tile after tile, one an SM, whole pairs
  int dkdv_splits =
      1;  // CTAs that share the query heads of one key head; > 1 sums fp32 partials afterwards
  DqPath dq_path = DqPath::converted;
  bool sweeps = false;       // sm90: a CTA draws a head and takes all its key tiles, one after the
                             // other; of packed sequences table.swept_rows says it
  bool takes_turns = false;  // dQ's adders wait for one another (shared/schedule/turns.h)
  bool counts_additions = false;
  std::size_t lse_log2_offset = 0;
  std::size_t softmax_d_offset = 0;
  std::size_t dq_accum_offset = 0;
  std::size_t tickets_offset = 0;     // two counters: CTAs, or tiles, that have started, and, with
                                      // DqPath::finished, strips of sums that were drawn
  std::size_t given_back_offset = 0;  // of those, what each finishing warp has not come to
  std::size_t additions_offset = 0;   // per head and query tile, or head, if counts_additions
  int sink_shares = 0;                // with dsink: numbers of each head that add up to it
  std::size_t sink_shares_offset = 0;
  SharedTiles shared_tiles;
  std::size_t part_sums_offset = 0;
  int part_counters = 0;  // one for each part and warpgroup with dK and dV
  std::size_t part_counters_offset = 0;
  std::size_t dk_partial_offset = 0;
  std::size_t dv_partial_offset = 0;
  std::size_t workspace_bytes = 0;
};

using Stream = CUstream_st*;

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device);
void run_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream);

BackwardPlan plan_backward(const BackwardParams& params, const DeviceInfo& device);
void run_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream);

// Before plan_forward and run_forward of a call that appends to its cache or rotates.
void run_append(const AppendParams& params, Stream stream);

// Rotary embedding by itself: one kernel, in place or not.
void run_rotary(const RotaryParams& params, Stream stream);

// run_forward combines its own splits; this is for partial results of the caller's.
void run_combine(const CombineParams& params, Stream stream);

// Slow and simple: a thread block per query and head.
void run_debug_probabilities(const DebugProbabilitiesParams& params, Stream stream);

// Rows per head that softmax_d has where it is not packed.
constexpr int round_up_seqlen(int seqlen) { return (seqlen + 127) / 128 * 128; }

// What this library holds, in selection order.
std::span<const ForwardInstance* const> forward_instances();
std::span<const BackwardInstance* const> backward_instances();

}  // namespace flash_attn_cuda
