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

// How tiles map to the one-dimensional grid. Heads are taken in sections whose keys and values fit
// in L2 together; inside a section the longest tiles of every head come first, so that a masked
// grid ends on short tiles.
struct TileSchedule {
  int num_tiles = 0;        // tiles per (batch, head)
  int num_heads = 0;        // heads per batch of this grid
  int num_batch_heads = 0;  // batch * heads
  int heads_per_section = 1;
  bool longest_first = false;  // tile index runs down instead of up
  std::int64_t grid_size() const { return static_cast<std::int64_t>(num_tiles) * num_batch_heads; }
};

struct ForwardInstance;
struct BackwardInstance;

struct ForwardPlan {
  const ForwardInstance* instance = nullptr;
  TileSchedule schedule;
};

// The backward runs as preprocess -> main -> convert. Offsets are bytes into the workspace.
struct BackwardPlan {
  const BackwardInstance* instance = nullptr;
  TileSchedule schedule;     // tiles are key blocks; heads are key heads times dkdv_splits
  int seqlen_q_rounded = 0;  // rows of softmax_d and lse_log2 per head
  int dkdv_splits =
      1;  // CTAs that share the query heads of one key head; > 1 sums fp32 partials afterwards
  std::size_t lse_log2_offset = 0;
  std::size_t dq_accum_offset = 0;
  std::size_t dk_partial_offset = 0;
  std::size_t dv_partial_offset = 0;
  std::size_t workspace_bytes = 0;
};

using Stream = CUstream_st*;

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device);
void run_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream);

BackwardPlan plan_backward(const BackwardParams& params, const DeviceInfo& device);
void run_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream);

// softmax_d's row count, needed by a caller before it can fill BackwardParams.
constexpr int round_up_seqlen(int seqlen) { return (seqlen + 127) / 128 * 128; }

// What this library holds, in selection order.
std::span<const ForwardInstance* const> forward_instances();
std::span<const BackwardInstance* const> backward_instances();

}  // namespace flash_attn_cuda
