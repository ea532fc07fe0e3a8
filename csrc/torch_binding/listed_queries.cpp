#include "torch_binding/listed_queries.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/full.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>

#include <algorithm>
#include <tuple>

#include "torch_binding/layout.h"

namespace flash_attn_cuda::binding {
namespace {

// Of each row of q: the row of k that its sequence begins with, and the sequence's keys.
struct KeysOfRows {
  at::Tensor first;
  at::Tensor count;
};

KeysOfRows keys_of_rows(const AttentionCall& call) {
  const at::TensorOptions options = call.key_lists.options();
  if (!is_packed(call)) {
    const std::int64_t rows = call.q.size(0) * call.q.size(1);
    const at::Tensor sequence =
        at::floor_divide(at::arange(rows, options), std::max<std::int64_t>(1, call.q.size(1)));
    const at::Tensor count = at::full(at::IntArrayRef(rows), call.k.size(1), options);
    return {sequence.mul(call.k.size(1)), count};
  }
  const at::Tensor rows = at::arange(call.q.size(0), options);
  // Rows behind the last sequence count as its: they do not attend.
  const at::Tensor sequence = at::searchsorted(call.cu_seqlens_q, rows, /*out_int32=*/false,
                                               /*right=*/true)
                                  .sub_(1)
                                  .clamp_(0, batch_of(call) - 1);
  const at::Tensor first = call.cu_seqlens_k.index_select(0, sequence);
  at::Tensor count = call.cu_seqlens_k.index_select(0, sequence.add(1)).sub(first);
  if (call.seqused_k.defined())
    count = at::minimum(count, call.seqused_k.index_select(0, sequence));
  return {first, count};
}

std::int64_t rows_of_keys(const AttentionCall& call) {
  return is_packed(call) ? call.k.size(0) : call.k.size(0) * call.k.size(1);
}

}  // namespace

ListedTensors listed_tensors(const AttentionCall& call) {
  const std::int64_t heads = heads_k_of(call);
  const std::int64_t rows_k = rows_of_keys(call);
  const std::int64_t block = call.key_list_block;
  const at::TensorOptions options = call.key_lists.options();
  const at::Tensor lists =
      call.key_lists.reshape({-1, heads, call.key_lists.size(-1)});  // (rows of q, heads, n)
  const at::Tensor all_places = at::arange(heads * rows_k + 1, options);
  if (lists.numel() == 0 || batch_of(call) == 0) {
    const at::Tensor none = at::empty({0}, options);
    return {none, none, all_places.mul(0), none};
  }
  const KeysOfRows keys = keys_of_rows(call);
  const auto of_rows = [](const at::Tensor& x) { return x.view({-1, 1, 1}); };
  const at::Tensor blocks = at::floor_divide(keys.count.add(block - 1), block);
  const at::Tensor names_block = lists.ge(0).logical_and_(lists.lt(of_rows(blocks)));
  at::Tensor row = lists.masked_fill(names_block.logical_not(), 0).mul_(block);
  row.add_(of_rows(keys.first));
  const at::Tensor exists = row.ge(0).logical_and_(row.lt(rows_k)).logical_and_(names_block);
  row.add_(at::arange(heads, options).mul_(rows_k).view({1, -1, 1}));
  row.masked_fill_(exists.logical_not(), heads * rows_k);
  // Stable, so that the queries of a block ascend.
  auto [places, order] = at::sort(row.flatten(), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor rows_q = at::floor_divide(order, lists.size(1) * lists.size(2)).to(at::kInt);
  at::Tensor ranks;
  if (call.deterministic) {
    const at::Tensor of_list = row.contiguous();
    const at::Tensor ascending = std::get<0>(of_list.sort());
    ranks = at::searchsorted(ascending, of_list, /*out_int32=*/true).flatten();
    ranks = ranks.index_select(0, order);
  }
  return {places, rows_q, at::searchsorted(places, all_places, /*out_int32=*/true), ranks};
}

ListedQueries listed_queries(const AttentionCall& call) {
  if (!lists_blocks(call)) return {};
  return {.entries = static_cast<int>(call.key_lists.numel()),
          .key_rows = static_cast<int>(rows_of_keys(call)),
          .block = static_cast<int>(call.key_list_block)};
}

ListedQueries listed_queries(const AttentionCall& call, const ListedTensors& tensors) {
  ListedQueries listed = listed_queries(call);
  listed.entries = static_cast<int>(tensors.places.numel());
  listed.places = tensors.places.const_data_ptr<int>();
  listed.rows = tensors.rows.const_data_ptr<int>();
  listed.begins = tensors.begins.const_data_ptr<int>();
  if (tensors.ranks.defined()) listed.ranks = tensors.ranks.const_data_ptr<int>();
  return listed;
}

}  // namespace flash_attn_cuda::binding
