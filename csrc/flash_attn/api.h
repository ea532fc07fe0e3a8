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
struct Sequence;   // shared/sequence/sequence.h
struct TileEntry;  // likewise

// `count` elements of the workspace from byte `offset` on; null where a call has none.
template <class T>
struct Buffer {
  std::size_t offset = 0;
  std::int64_t count = 0;

  bool exists() const { return count > 0; }
  T* in(void* workspace) const {
    return exists() ? reinterpret_cast<T*>(static_cast<char*>(workspace) + offset) : nullptr;
  }
};

// Packed sequences are read from a table that a small kernel makes of cu_seqlens before the main
// one: checked bounds of every sequence, and the list of tiles, the costliest first
// (auxiliary/sequence_table.cu). Grids are upper bounds; what is beyond the list has no work.
struct SequenceTablePlan {
  int tile_rows = 0;           // rows of a tile of the list
  int rows_per_query = 1;      // rows that a query stands for: its heads, where they share a tile
  bool tiles_descend = false;  // a sequence's last tile comes first
  int q_tile_rows = 0;         // backward: rows of a query tile
  int swept_rows = 0;          // sm90 backward: sequences of at most so many rows of queries and of
                               // keys have one entry, whose CTA takes all their tiles
  Buffer<int> counts = {};
  Buffer<Sequence> sequences = {};
  Buffer<TileEntry> tiles = {};    // at most
  Buffer<TileEntry> q_tiles = {};  // backward: query tiles of all sequences, at most

  bool used() const { return counts.exists(); }
};

// How the CTAs of a latent kernel share the work (sm90/latent/share.h).
enum class TileSharing : std::uint8_t {
  whole,  // each takes whole tiles
  even,   // each takes as many blocks of keys, of one tile or of several
  parts   // tiles have parts, which do not depend on other tiles; each takes as many of those
};

// Those of a tile's keys that several CTAs share: `count` from number `first` on.
struct PartsOfTile {
  int first;
  int count;
};

// The dimensions of a call's tensors as they lie, packed or in pages. Gradients have those of their
// tensors.
struct TensorExtent {
  int batch_size = 0;
  int rows = 0;
  int num_heads = 0;
  int head_dim = 0;
};
struct TensorExtents {
  TensorExtent q, k, v, out;
};

// Which kernel runs a call, on what grid, and where its buffers lie in the workspace.
struct ForwardPlan {
  const ForwardInstance* instance = nullptr;
  Window window;  // the call's, as normalize_window (host/normalize_window.h) makes it
  TensorExtents extents;
  bool has_vector_rows = false;  // rows of all tensors are whole vectors of 16 bytes
  TileSchedule schedule;
  SequenceTablePlan table;
  std::int64_t grid = 0;        // CTAs of the main kernel
  int num_ctas = 0;             // CTAs that fit the device at once; sm90: that stay, at most
  int num_splits = 1;           // CTAs that share the keys of a tile, at most
  int keys_per_split = 0;       // fixed length of a split, in keys; 0: what the lengths ask for
  bool lengths_decide = false;  // decode: they set the number of splits, and CTAs take tickets
  // Counters that nobody has zeroed (shared/schedule/marked_counter.h).
  Buffer<unsigned long long> tickets;       // sm90: tiles that CTAs have taken, with tickets
  Buffer<unsigned long long> arrivals;      // decode: splits of a tile that are there
  Buffer<unsigned long long> item_tickets;  // decode: splits of all tiles that CTAs have taken
  Buffer<float> out_partial, lse_partial;
  TileSharing sharing = TileSharing::whole;  // latent
  bool in_pairs = false;                     // latent: two CTAs have tiles of the same keys
  Buffer<PartsOfTile> parts_of_tiles;        // latent, unless tiles are whole
  std::size_t workspace_bytes = 0;
};

// How dQ, to which every key tile of a sequence adds, becomes dq.
enum class DqPath : std::uint8_t {
  converted,  // a kernel that follows converts fp32 sums to dq
  finished,   // idle warps of the main kernel do, while it runs, and what is left then follows
  ordered,    // key tiles add one after the other: the first stores its dQ, the last writes dq
  direct      // a sequence has one key tile, which writes dq; there are no sums
};

// sm90 backward: key tiles that several CTAs share (shared/schedule/tile_parts.h), `count` from
// number `first` on in the order in which they are taken.
struct SharedTiles {
  int first = 0;
  int count = 0;
  int parts = 1;  // of a tile, at most

  std::int64_t places() const { return static_cast<std::int64_t>(count) * parts; }
  std::int64_t more_tickets() const { return places() - count; }
};

// The backward runs as [sequence table ->] preprocess -> main [-> convert] [-> reduce].
struct BackwardPlan {
  const BackwardInstance* instance = nullptr;
  Window window;  // as of ForwardPlan
  TensorExtents extents;
  TileSchedule schedule;  // tiles are key blocks; heads are key heads times dkdv_splits
  SequenceTablePlan table;
  int q_tiles = 0;  // query tiles per head, of all sequences together: the statistics of head h,
                    // tile t lie at index h * q_tiles + t, and so do sums of dQ, unless sweeps
  int q_tiles_per_sequence = 0;   // 0 where a table says it
  bool tiles_descend = false;     // a sequence's last key tile comes first
  std::int64_t grid = 0;          // CTAs of the main kernel
  std::int64_t convert_grid = 0;  // and of the one that converts what leaves_sums()
  int num_ctas = 0;     // sm90: at most so many CTAs take tile after tile, one an SM, whole pairs
  int dkdv_splits = 1;  // CTAs that share the query heads of one key head; > 1 sums fp32 partials
                        // afterwards
  DqPath dq_path = DqPath::converted;
  bool sweeps = false;           // sm90: a CTA takes all key tiles of a head, one after another; of
                                 // packed sequences table.swept_rows says it
  bool takes_turns = false;      // dQ's adders wait for one another (shared/schedule/turns.h)
  int turn_words = 0;            // with lists: of a query tile's marks
  int entries_per_cta = 0;       // with lists of blocks: of ListedQueries; 0: no lists
  int sink_shares_per_head = 0;  // with dsink: numbers that add up to a head's
  SharedTiles shared_tiles;
  Buffer<float> lse_log2, softmax_d, dq_accum;
  Buffer<float> tangent_lse, tangent_dot;  // with tangents: that of lse, and rowsum(dO * that of O)
  Buffer<int> tickets;       // two counters: CTAs, or tiles, that have started, and, with
                             // DqPath::finished, strips of sums that were taken
  Buffer<int> additions;     // per head and query tile, or head, where additions to dQ are counted
  Buffer<int> listed_turns;  // with lists of blocks: sm80/listed_backward/turns.h
  Buffer<int> given_back;    // strips that a finishing warp has taken and not come to
  Buffer<float> sink_shares;
  Buffer<unsigned long long> sink_arrivals;  // of each head, where the preprocess kernel sums those
  Buffer<float> part_sums;
  Buffer<int> part_counters;  // one for each part and warpgroup with dK and dV
  Buffer<float> dk_partial, dv_partial;
  std::size_t workspace_bytes = 0;

  // The tickets of an sm90 kernel: one for every tile, or for every part of one.
  std::int64_t num_tickets() const { return schedule.grid_size() + shared_tiles.more_tickets(); }
  // Whether sums of dQ are left when the main kernel has ended, and of dK and dV.
  bool leaves_sums() const { return dq_path == DqPath::converted || dq_path == DqPath::finished; }
  bool leaves_key_sums() const { return dkdv_splits > 1 || entries_per_cta > 0; }
};

using Stream = CUstream_st*;

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device);
void run_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream);

BackwardPlan plan_backward(const BackwardParams& params, const DeviceInfo& device);
void run_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream);

// Comes before plan_forward and run_forward of a call that appends to its cache or rotates.
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
