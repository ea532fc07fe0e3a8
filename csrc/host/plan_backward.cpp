#include <algorithm>

#include "auxiliary/auxiliary.h"
#include "host/choose_backward.h"
#include "host/error.h"
#include "host/normalize_window.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "shared/gradient/finishes_dq.h"

namespace flash_attn_cuda {
namespace {

// The kernels around the main one give a query row up to 32 threads, in blocks of 256.
constexpr std::int64_t max_query_rows = max_grid * 8;

void check_backward(const BackwardParams& params) {
  check_call(params.shape, params.score.softmax_scale);
  check_origin(params.sequences, {}, params.sparsity, params.shape);
  const auto check_multiple = [step = elements_of_vector(params.dtype)](const char* field,
                                                                        int value) {
    if (value % step != 0)
      throw_error(field, " must be a multiple of ", step, " in a backward, got ", value);
  };
  check_multiple("head_dim", params.shape.head_dim);
  check_multiple("head_dim_v", params.shape.head_dim_v);
  const SequenceParams& sequences = params.sequences;
  if ((sequences.cu_seqlens_q == nullptr) != (sequences.cu_seqlens_k == nullptr)) {
    throw_error("cu_seqlens_q and cu_seqlens_k must be given together, got ",
                sequences.cu_seqlens_q == nullptr ? "cu_seqlens_k" : "cu_seqlens_q", " alone");
  }
  if (params.dsink != nullptr && params.score.sink == nullptr) {
    throw_error("sink must be given with dsink, got dsink alone");
  }
  if (params.accumulate && !params.fp32_results) {
    throw_error("fp32_results must be given with accumulate, got accumulate alone");
  }
}

// sm90 kernels store tiles of it in 16 bits by TMA, or add eight neighbours at a time to sums.
bool can_write_dbias(const BackwardParams& params) {
  const BiasGradient& dbias = params.dbias;
  if (dbias.data == nullptr) return true;
  const PairTensor tensor = pair_tensor(dbias, params.score.bias, params.dtype, params.shape);
  return tma_can_move(tensor) && tensor.columns % 8 == 0 && (dbias.is_summed || !dbias.is_fp32);
}

KernelRequest request_of(const BackwardParams& params, const TensorExtents& extents) {
  KernelRequest request = common_request(params, extents);
  if (params.deterministic) request.features |= feature::deterministic;
  if (params.listed.block > 0) request.features |= feature::key_lists;
  request.suits_sm90 = request.suits_sm90 && tma_can_move(params.dout, params.dtype, extents.out) &&
                       tma_can_move(params.dk, params.dtype, extents.k) &&
                       tma_can_move(params.dv, params.dtype, extents.v) && can_write_dbias(params);
  return request;
}

// Query tiles of one head, over all sequences. Also keeps every size below within 64 bits.
int count_query_tiles(const BackwardParams& params, int per_sequence, int block_m) {
  const AttentionShape& shape = params.shape;
  const std::int64_t tiles = is_packed(params.sequences)
                                 ? most_packed_tiles(shape, per_sequence, shape.seqlen_q)
                                 : std::int64_t{per_sequence} * shape.batch_size;
  if (tiles > max_query_rows / block_m / shape.num_heads_q) {
    throw_error("query rows of all sequences (rounded up to ", block_m,
                ") times num_heads_q must be at most ", max_query_rows, ", got ", tiles * block_m,
                " * ", shape.num_heads_q);
  }
  return static_cast<int>(tiles);
}

// What a section holds at least: so many tiles, and as many heads as fill 1 / parts_of_l2 of L2.
struct LeastSection {
  std::int64_t tiles;
  int parts_of_l2;
};

LeastSection least_section(const BackwardParams& params, const BackwardConfig& config,
                           int tiles_per_head, const DeviceInfo& device) {
  const bool is_even = has_even_tiles(params);
  const std::int64_t at_a_time = device.num_sms / config.ctas_per_tile;  // tiles
  // One CTA has an SM to itself, and two tiles for each, or each pair, even out a causal grid.
  const LeastSection usual{.tiles = is_even ? 0 : 2 * at_a_time, .parts_of_l2 = 2};
  if (config.family != KernelFamily::sm90) return usual;
  // Key tiles of a head that wait for one another are better off with few beside them: under a mask
  // eight or so of a head at a time.
  if (params.deterministic) {
    const std::int64_t tiles_of_heads = is_even ? 0 : at_a_time / 8 * tiles_per_head;
    return {.tiles = std::max(2 * at_a_time, tiles_of_heads), .parts_of_l2 = 2};
  }
  // Neighbouring heads of a row lie side by side in memory, and short sequences take longer if few
  // bytes of a row are read and written at a time. With lists nobody has tried how few.
  if (is_packed(params.sequences)) {
    constexpr int bytes_of_row = 512;
    const int bytes_of_head = bytes_of(params.dtype) * params.shape.head_dim;
    const int heads =
        params.sparsity.lists.data != nullptr ? 1 : ceil_div(bytes_of_row, bytes_of_head);
    return {.tiles = std::max(2 * at_a_time, std::int64_t{heads} * tiles_per_head),
            .parts_of_l2 = 16};
  }
  // Lists take two heads at a time: with one, a mask of documents takes 3 % longer, with four, what
  // random lists add to leaves L2.
  if (params.sparsity.lists.data != nullptr)
    return {.tiles = 2 * std::int64_t{tiles_per_head}, .parts_of_l2 = 4};
  // CTAs that take tickets come out even with fewer tiles in a section, and what they read and add
  // to stays in L2. Tiles of equal length come out even anyhow.
  return is_even ? LeastSection{.tiles = 0, .parts_of_l2 = 8}
                 : LeastSection{.tiles = 3 * at_a_time / 4, .parts_of_l2 = 4};
}

// Query and key tiles, how many CTAs share them, and in which order.
void plan_tiles(const BackwardParams& params, const DeviceInfo& device, BackwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  const BackwardConfig& config = plan.instance->config;
  const bool is_sm90 = config.family == KernelFamily::sm90;
  const bool packed = is_packed(params.sequences);
  if (is_sm90)
    plan.num_ctas = std::max(1, device.num_sms / config.ctas_per_tile) * config.ctas_per_tile;
  const int q_tiles = checked_tiles(shape.seqlen_q, 1, config.block_m);  // of all rows, if packed
  plan.q_tiles = count_query_tiles(params, q_tiles, config.block_m);
  plan.q_tiles_per_sequence = packed ? 0 : q_tiles;
  // A right bound hides most queries from the last keys, so the long tiles come first as they are;
  // a left bound alone does the opposite.
  plan.tiles_descend =
      params.window.left != Window::unbounded && params.window.right == Window::unbounded;
  int key_tiles = checked_tiles(shape.seqlen_k, 1, config.block_n);
  if (packed) {
    key_tiles = most_packed_tiles(shape, key_tiles, shape.seqlen_k);
    plan.table = {.tile_rows = config.block_n,
                  .tiles_descend = plan.tiles_descend,
                  .q_tile_rows = config.block_m};
  }
  const int batch_size = packed ? 1 : shape.batch_size;
  plan.dkdv_splits =
      choose_dkdv_splits(params, config, batch_size * std::int64_t{key_tiles}, device);
  const LeastSection section = least_section(params, config, key_tiles, device);
  const std::int64_t bytes_per_query =
      bytes_of(params.dtype) * (shape.head_dim + shape.head_dim_v) +  // Q and dO
      std::int64_t{sizeof(float)} * config.head_dim;                  // the sum of dQ
  const std::int64_t group = shape.heads_per_key_head();
  // A sequence's queries stay in L2, not all of a packed call's (sm80: not timed).
  const int queries_at_once = is_sm90 ? most_queries(shape, params.sequences) : shape.seqlen_q;
  // What the heads of one split read and add to stays in L2 where all of a group's would not.
  // Packed calls are 0 to 2 % faster with a group's splits side by side.
  const bool splits_alone = !packed && splits_even_out_tiles(params, config);
  const int splits_per_group = splits_alone ? 1 : plan.dkdv_splits;
  const std::int64_t heads_per_group = group / plan.dkdv_splits * splits_per_group;
  plan.schedule =
      make_schedule({.num_tiles = key_tiles,
                     .batch_size = batch_size,
                     .num_heads = shape.num_heads_k * plan.dkdv_splits,
                     .heads_per_group = splits_per_group,
                     .bytes_per_group = heads_per_group * bytes_per_query * queries_at_once,
                     .min_tiles = section.tiles,
                     .longest_first = plan.tiles_descend && !packed,
                     .parts_of_l2 = section.parts_of_l2},
                    device);
  choose_sweeps(params, bytes_per_query, device, plan);
}

std::int64_t main_grid(const BackwardParams& params, const BackwardPlan& plan) {
  const BackwardConfig& config = plan.instance->config;
  const AttentionShape& shape = params.shape;
  const std::int64_t key_tiles = plan.schedule.grid_size();
  if (plan.entries_per_cta > 0)  // as many for each tile of a block
    return std::int64_t{ceil_div(params.listed.entries, plan.entries_per_cta)} *
           params.listed.tiles_of_block(config.block_n);
  if (config.is_wide)  // one for a tile of dK, one of dQ, one of dV
    return 2 * key_tiles + std::int64_t{plan.q_tiles} * shape.num_heads_q;
  if (config.family == KernelFamily::sm90)
    return std::min<std::int64_t>(plan.num_tickets() * config.ctas_per_tile, plan.num_ctas);
  return key_tiles *
         ctas_of_columns(config.columns_per_cta, std::max(shape.head_dim, shape.head_dim_v));
}

// CTAs of the kernel that converts sums of dQ: one for a query tile, or for a few strips of one.
std::int64_t convert_grid(const BackwardParams& params, const BackwardPlan& plan) {
  const BackwardConfig& config = plan.instance->config;
  const std::int64_t tiles = std::int64_t{plan.q_tiles} * params.shape.num_heads_q *
                             ctas_of_columns(config.columns_per_cta, params.shape.head_dim);
  if (!plan.leaves_sums()) return 0;
  if (config.family != KernelFamily::sm90) return tiles;
  const std::int64_t most = tiles * (config.block_m / convert_dq_rows);
  // How much is left after a kernel that finishes is for the device to know.
  const bool was_finishing = plan.dq_path == DqPath::finished && plan.grid > 0;
  return was_finishing ? std::min(most, std::int64_t{plan.num_ctas} * convert_dq_ctas_per_sm)
                       : most;
}

// Counters of a query tile or, with lists, words of marks, for each CTA that shares its columns.
std::int64_t additions_per_tile(const BackwardParams& params, const BackwardPlan& plan) {
  if (plan.turn_words == 0) return 1;
  const int columns_per_cta = plan.instance->config.columns_per_cta;
  return std::int64_t{plan.turn_words} * ctas_of_columns(columns_per_cta, params.shape.head_dim);
}

// Counters of sums of listed queries: of rows of q, of tiles of k, of CTAs.
std::int64_t listed_turns(const BackwardParams& params, const BackwardConfig& config) {
  const std::int64_t tiles = key_rows(params) * params.listed.tiles_of_block(config.block_n);
  return params.shape.num_heads_k * (query_rows(params) + tiles) + 1;
}

void lay_out(const BackwardParams& params, BackwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  const BackwardConfig& config = plan.instance->config;
  const std::int64_t query_tiles = std::int64_t{shape.num_heads_q} * plan.q_tiles;
  const std::int64_t query_rows = query_tiles * config.block_m;
  WorkspaceLayout workspace;
  if (is_packed(params.sequences))
    lay_out_table(plan.table, shape.batch_size, plan.schedule.num_tiles, plan.q_tiles, workspace);
  plan.lse_log2 = workspace.add<float>(query_rows);
  plan.softmax_d = workspace.add<float>(query_rows);
  plan.tangent_lse = workspace.add<float>(params.tangents.is_given ? query_rows : 0);
  plan.tangent_dot = workspace.add<float>(params.tangents.is_given ? query_rows : 0);
  if (plan.dq_path != DqPath::direct) {
    // A CTA that sweeps has sums of its tile's heads alone.
    const std::int64_t heads = shape.num_heads_q / plan.schedule.num_heads;
    const std::int64_t tiles =
        plan.sweeps ? plan.num_ctas * heads * plan.q_tiles_per_sequence : query_tiles;
    plan.dq_accum = workspace.add<float>(tiles * config.block_m * config.head_dim);
  }
  plan.tickets = workspace.add<int>(2);
  if (plan.takes_turns || plan.dq_path == DqPath::finished)
    plan.additions = workspace.add<int>(query_tiles * additions_per_tile(params, plan));
  if (plan.dq_path == DqPath::finished)
    plan.given_back = workspace.add<int>(std::int64_t{finishing_warps} * plan.num_ctas);
  plan.sink_shares =
      workspace.add<float>(std::int64_t{shape.num_heads_q} * plan.sink_shares_per_head);
  // The main kernels of the sm90 family sum them, if they are launched.
  const bool sums_shares = config.family == KernelFamily::sm90 && !config.is_wide && plan.grid > 0;
  if (plan.sink_shares.exists() && !sums_shares)
    plan.sink_arrivals = workspace.add<unsigned long long>(shape.num_heads_q);
  const std::int64_t places = plan.shared_tiles.places();
  plan.part_sums = workspace.add<float>(places * part_sums(config));
  plan.part_counters = workspace.add<int>(places * part_counters(config));
  if (plan.leaves_key_sums()) {
    const std::int64_t rows = plan.dkdv_splits * key_rows(params) * shape.num_heads_k;
    plan.dk_partial = workspace.add<float>(rows * config.head_dim);
    plan.dv_partial = workspace.add<float>(rows * config.head_dim_v);
  }
  if (params.deterministic && params.listed.block > 0)
    plan.listed_turns = workspace.add<int>(listed_turns(params, config));
  plan.workspace_bytes = workspace.bytes();
}

}  // namespace

BackwardPlan plan_backward(const BackwardParams& given, const DeviceInfo& device,
                           std::span<const BackwardInstance* const> instances) {
  check_backward(given);
  BackwardParams params = given;
  params.window = normalize_window(given.window, given.shape, given.sequences);
  BackwardPlan plan;
  plan.window = params.window;
  plan.extents = tensor_extents(params.shape, params.sequences);
  plan.instance = &select_instance(instances, request_of(params, plan.extents), device);
  plan_tiles(params, device, plan);
  plan.entries_per_cta = choose_entries(params, plan.instance->config, device);
  plan.dq_path = choose_dq_path(params, plan);
  const bool has_listed = params.listed.block > 0;  // which take other turns
  plan.takes_turns = params.deterministic && plan.dq_path != DqPath::direct && !has_listed;
  if (plan.takes_turns && params.sparsity.lists.data != nullptr)
    plan.turn_words = ceil_div(ceil_div(params.shape.seqlen_k, plan.instance->config.block_n), 32);
  plan.shared_tiles = choose_shared_tiles(params, plan);
  const BackwardConfig& config = plan.instance->config;
  plan.grid = main_grid(params, plan);
  check_grid(plan.grid, 1);
  plan.convert_grid = convert_grid(params, plan);
  if (params.dsink != nullptr)
    plan.sink_shares_per_head = plan.q_tiles * preprocess_blocks_per_tile(params, config.block_m);
  lay_out(params, plan);
  return plan;
}

BackwardPlan plan_backward(const BackwardParams& params, const DeviceInfo& device) {
  return plan_backward(params, device, backward_instances());
}

}  // namespace flash_attn_cuda
