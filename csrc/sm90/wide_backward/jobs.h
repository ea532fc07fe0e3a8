// Which tile of which gradient a CTA makes: first all of dK, then of dQ and of dV, which take less
// time in this order.
#pragma once

#include "sm90/wide_backward/arguments.h"
#include "sm90/wide_backward/traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
CUTE_DEVICE WideJob find_key_job(BackwardArguments const& call, Gradient gradient, int id) {
  AttentionShape const& shape = call.params.shape;
  TileWork work;
  if (!find_work(call.schedule, call.table, call.params, id, work))
    return {.gradient = Gradient::none};
  const int key_begin = work.tile * Traits::block;
  const int key_last = min(key_begin + Traits::block, work.sequence.seqlen_k) - 1;
  const int heads = shape.heads_per_key_head();
  return {.gradient = gradient,
          .sequence = work.sequence,
          .tile = work.tile,
          .head = work.head,
          .steps = {.range = tiles_that_see<Traits::block>(call.params.window, work.sequence,
                                                           key_begin, key_last),
                    .first_head = work.head * heads,
                    .heads = heads}};
}

template <class Traits>
CUTE_DEVICE WideJob find_query_job(BackwardArguments const& call, int id) {
  AttentionShape const& shape = call.params.shape;
  const int head = id / call.q_tiles;
  int index = id - head * call.q_tiles;
  // Under a right bound the last tiles take longest.
  if (call.params.window.right != Window::unbounded) index = call.q_tiles - 1 - index;
  QueryTile work;
  if (!find_query_tile(call.table, call.params, call.q_tiles_per_sequence, index, work))
    return {.gradient = Gradient::none};
  const int query_begin = work.tile * Traits::block;
  const int query_last = min(query_begin + Traits::block, work.sequence.seqlen_q) - 1;
  return {.gradient = Gradient::dq,
          .sequence = work.sequence,
          .tile = work.tile,
          .head = head,
          .steps = {
              .range = block_range(band_from_queries(call.params.window, work.sequence.shift),
                                   query_begin, query_last, work.sequence.seqlen_k, Traits::block),
              .first_head = shape.key_head(head),
              .heads = 1}};
}

template <class Traits>
CUTE_DEVICE WideJob find_job(WideBackwardArguments const& args) {
  int id = blockIdx.x;
  WideJob job;
  if (id < args.key_tiles) {
    job = find_key_job<Traits>(args.call, Gradient::dk, id);
  } else if (id -= args.key_tiles; id < args.query_tiles) {
    job = find_query_job<Traits>(args.call, id);
  } else {
    job = find_key_job<Traits>(args.call, Gradient::dv, id - args.query_tiles);
  }
  job.sequence.first_q_tile += job.sequence.index * args.call.q_tiles_per_sequence;
  return job;
}

}  // namespace flash_attn_cuda::sm90
