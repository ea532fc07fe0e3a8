// The tiles of a backward step on their way to shared memory.
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "sm80/backward/find_tile.h"

namespace flash_attn_cuda::sm80 {

// Index of a step's tile among the query tiles of all heads.
template <class Step>
CUTE_DEVICE std::int64_t q_tile_index(BackwardArguments const& args, Sequence const& sequence,
                                      Step const& step) {
  return std::int64_t(step.head) * args.q_tiles + sequence.first_q_tile + step.tile;
}

// Of any kernel that walks the query tiles of a key tile.
template <class Traits>
struct TileLoads {
  BackwardArguments const& args;
  Sequence const& sequence;
  typename Traits::SharedStorage& smem;
  int thread;

  template <class Step>
  CUTE_DEVICE std::int64_t q_tile_index(Step const& step) const {
    return sm80::q_tile_index(args, sequence, step);
  }

  CUTE_DEVICE void load_keys(TensorView const& view, OwnGradients<Traits> const& own, int columns,
                             typename Traits::Element* buffer) const {
    auto tile = smem_tile<typename Traits::KeyLayout>(buffer);
    Traits::KeyLoader::load(view, sequence.batch_k, own.head_k, sequence.row_k + own.key_begin,
                            sequence.seqlen_k - own.key_begin, columns, tile, thread);
  }
};

template <class Traits>
struct StepLoads : TileLoads<Traits> {
  using Base = TileLoads<Traits>;
  using Base::args, Base::sequence, Base::smem, Base::thread;
  static constexpr int block_m = Traits::block_m;

  // Where a step's data lies. Found while the loads before it are on their way.
  struct Sources {
    typename Traits::QueryLoader::Source q, dout;
    std::int64_t first_row;  // of the row statistics
  };

  template <class Step>
  CUTE_DEVICE Sources sources_of(Step const& step) const {
    const int query = step.tile * block_m;
    auto source = [&](TensorView const& view) {
      return Traits::QueryLoader::source(view, sequence.batch_q, step.head, sequence.row_q + query,
                                         sequence.seqlen_q - query, thread);
    };
    return {source(args.params.q), source(args.params.dout), this->q_tile_index(step) * block_m};
  }

  CUTE_DEVICE void load_queries(Sources const& sources, int buffer) const {
    auto tile = smem_tile<typename Traits::QueryLayout>(smem.q[buffer]);
    Traits::QueryLoader::load(args.params.q, sources.q, args.params.shape.head_dim, tile, thread);
  }
  CUTE_DEVICE void load_dout(Sources const& sources, int buffer) const {
    auto tile = smem_tile<typename Traits::QueryLayout>(smem.dout[buffer]);
    Traits::QueryLoader::load(args.params.dout, sources.dout, args.params.shape.head_dim_v, tile,
                              thread);
  }
  CUTE_DEVICE void load_row_statistics(Sources const& sources, int buffer) const {
    constexpr int copies = block_m / 4;  // of 16 bytes, for each of the two arrays
    if (thread >= 2 * copies) return;
    const bool is_lse = thread < copies;
    const int offset = 4 * (is_lse ? thread : thread - copies);
    const float* source = (is_lse ? args.lse_log2 : args.softmax_d) + sources.first_row + offset;
    float* target = (is_lse ? smem.lse_log2[buffer] : smem.softmax_d[buffer]) + offset;
    SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(*reinterpret_cast<const uint128_t*>(source),
                                               *reinterpret_cast<uint128_t*>(target));
  }

  template <class Step>
  CUTE_DEVICE void load_first(Step const& step) const {
    const Sources sources = sources_of(step);
    load_queries(sources, 0);
    load_dout(sources, 0);
    load_row_statistics(sources, 0);
    commit_loads();
  }

  // Loads, at the begin of step `index`, what of the one that follows has buffers of its own.
  template <class Step>
  CUTE_DEVICE void load_during(Step const& following, int index, bool is_last) const {
    const Sources sources = sources_of(following);
    wait_for_loads();  // this step's tiles are here; the previous step's buffers are free
    if (is_last) return;
    const int other = (index + 1) % 2;
    if (Traits::stages_q == 2) load_queries(sources, other);
    if (Traits::stages_do == 2) load_dout(sources, other);
    load_row_statistics(sources, other);
    commit_loads();
  }

  // Loads the rest, at its end.
  template <class Step>
  CUTE_DEVICE void load_behind(Step const& following, bool is_last) const {
    if (is_last || (Traits::stages_q == 2 && Traits::stages_do == 2)) return;
    const Sources sources = sources_of(following);
    __syncthreads();  // the single buffers are read
    if (Traits::stages_q == 1) load_queries(sources, 0);
    if (Traits::stages_do == 1) load_dout(sources, 0);
    commit_loads();
  }
};

}  // namespace flash_attn_cuda::sm80
