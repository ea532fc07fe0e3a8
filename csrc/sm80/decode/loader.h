// A warp's own copies of keys and values, slice by slice, from wherever their rows lie (cp.async,
// 16 bytes a thread; element by element where rows are not aligned, and through registers where
// latent values are of e4m3).
#pragma once

#include "shared/e8m0.h"
#include "shared/sequence/key_list.h"
#include "shared/sequence/paged_kv.h"
#include "sm80/decode/split.h"

namespace flash_attn_cuda::sm80 {

template <class Traits>
class SliceLoader {
 public:
  using Cached = typename Traits::Cached;
  static constexpr int slice = Traits::slice;

  // For the keys of `span`, whose other ones become zeros in a slice, unread. With a list the span
  // is of its entries, and places in it stand for keys below. sequence_of_list: in shared memory.
  // part: which of a group's warps loads its columns.
  CUTE_DEVICE SliceLoader(DecodeArguments const& args, TileWork const& work, KeySpan const& span,
                          KeyList const& list, const int* sequence_of_list, int part, int lane)
      : params(args.params),
        rows(KeyRows::of(args.params.paged, work.sequence)),
        span(span),
        head(work.head),
        sequence(work.sequence.index),
        k_column(part * Traits::key_columns),
        v_column(part * Traits::value_columns),
        lane(lane),
        lane_row(lane / chunks_per_row),
        lane_column(lane % chunks_per_row * chunk),
        k_begin(row_pointer<const Cached>(params.k, 0, head, lane_row) + k_column + lane_column),
        v_begin(row_pointer<const Cached>(params.v, 0, head, lane_row) + v_column + lane_column),
        has_vector_rows(Traits::is_e4m3 || args.has_vector_rows),
        has_consecutive_rows(has_vector_rows && !converts() && are_consecutive(rows, span.origin) &&
                             !(Traits::is_latent && list.entries != nullptr)),
        list(list),
        sequence_of_list(sequence_of_list) {
    if constexpr (Traits::lists_blocks) {
      blocks = ListedBlocks::of(params.key_list_block);
      has_runs = has_vector_rows && params.key_list_block % slice == 0;
    }
  }

  // Asks for the places of the first slice, from key_begin on.
  CUTE_DEVICE void start(int key_begin) {
    if constexpr (Traits::has_lists) read_entry(key_begin);
    look_up(key_begin);
  }

  // The slice from key_begin on, whose places were asked for, into `stage`: K, then V. Asks for
  // the places of the slice from key_after on. scales: of tokens, of K and then of V.
  CUTE_DEVICE void load(int key_begin, int key_after, Cached* stage, float* scales) {
    const KeyPlace place = next;
    [[maybe_unused]] const bool was_listed = is_listed;
    [[maybe_unused]] const unsigned run = seen_of_run;
    look_up(key_after);
    if (Traits::lists_blocks && has_runs) {
      present = run;
      if (run == 0) return;  // a slice that nobody reads
      copy_consecutive(stage, place, [&](int row) { return (run >> lane_row >> row & 1) != 0; });
    } else if (!Traits::lists_blocks && has_consecutive_rows) {
      const KeyPlace first = rows.checked(place, params.errors);
      misses = misses || !first.exists();
      const auto keys = static_cast<unsigned>(span.end - span.begin);
      const auto lane_key = static_cast<unsigned>(key_begin + lane_row - span.begin);
      copy_consecutive(stage, first, [&](int row) { return lane_key + row < keys; });
      if constexpr (Traits::is_e4m3) {
        const bool exists = first.exists() && has_key(key_begin);
        copy_scales(exists ? KeyPlace{first.batch, first.row + lane} : KeyPlace{}, scales);
      }
    } else {
      copy_scattered(stage, place, has_list() ? was_listed : has_key(key_begin), scales);
    }
  }

  // Of the slice that was loaded last, where there is a list: its keys that are there.
  CUTE_DEVICE unsigned present_keys() const { return present; }
  // Whether some key of this warp lies in no page; the same in all lanes.
  CUTE_DEVICE bool misses_page() const { return misses; }
  CUTE_DEVICE KeyRows const& key_rows() const { return rows; }

 private:
  using Bits = std::uint16_t;  // an element, unread
  static constexpr int atom_columns =
      Traits::is_e4m3 ? Traits::CachedTile::atom_columns : Traits::piece;
  static constexpr int chunk = sizeof(uint128_t) / sizeof(Cached);
  static constexpr int chunks_per_row = atom_columns / chunk;
  static constexpr int rows_per_pass = 32 / chunks_per_row;
  static constexpr int atom_rows = 8;

  CUTE_DEVICE bool has_list() const {
    return Traits::lists_blocks || (Traits::is_latent && list.entries != nullptr);
  }

  CUTE_DEVICE void read_entry(int key_begin) {
    if constexpr (Traits::lists_blocks) {
      const bool exists = has_runs ? key_begin < span.end : has_key(key_begin);
      const int place = key_begin + (has_runs ? 0 : lane);
      entry = exists ? list.entries[blocks.entry_of(place)] : KeyList::none;
    } else {
      entry = has_list() && has_key(key_begin) ? list.entries[key_begin + lane] : KeyList::none;
    }
  }

  // Of a list of blocks: the places from key_begin on.
  CUTE_DEVICE void look_up_blocks(int key_begin) {
    const int key = blocks.key_at(list, entry, key_begin + (has_runs ? 0 : lane));
    if (key == KeyList::none) blocks.tell(list, entry, *sequence_of_list, params.errors);
    seen_of_run = key == KeyList::none ? 0 : seen_keys(list.visible, key, slice);
    is_listed = (seen_of_run & 1) != 0;
    if (has_runs ? seen_of_run != 0 : is_listed) next = rows.look_up(key);
    read_entry(key_begin + Traits::step);
  }

  // Entries are read a slice ahead of the places that they name.
  CUTE_DEVICE void look_up(int key_begin) {
    next = {};
    if (Traits::lists_blocks) return look_up_blocks(key_begin);
    if constexpr (Traits::is_latent) {
      if (has_list()) {
        const int key = list.key_of(entry, params.errors);
        is_listed = key != KeyList::none;
        if (is_listed) next = rows.look_up(key);
        read_entry(key_begin + Traits::step);
        return;
      }
    }
    if (has_consecutive_rows) {
      if (key_begin < span.end) next = rows.look_up(key_begin);
    } else {
      if (has_key(key_begin)) next = rows.look_up(key_begin + lane);
    }
  }
  // Whether values are of e4m3 beside keys that are not.
  CUTE_DEVICE bool converts() const { return Traits::is_latent && params.e4m3_latent; }

  // The scale of this lane's key, and of its values; 0 where none is.
  CUTE_DEVICE void copy_scales(KeyPlace const& place, float* scales) const {
    if (lane >= slice) return;
    const auto copy = [&](ScaleView const& view, float* target) {
      if (!view.per_token) return;
      const std::int64_t offset =
          place.batch * view.batch_stride + place.row * view.row_stride + head * view.head_stride;
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(view.data[place.exists() ? offset : 0], *target,
                                                   place.exists());
    };
    copy(params.scales.k, scales + lane);
    copy(params.scales.v, scales + slice + lane);
  }

  // Whether the keys of every slice lie in rows one after the other. origin: the first key of one.
  CUTE_DEVICE static bool are_consecutive(KeyRows const& rows, int origin) {
    return !rows.is_paged() ||
           (rows.page_size.divisor % slice == 0 && (rows.first_row + origin) % slice == 0);
  }

  // This lane's first vector of a row of a slice, and how far others of its place in the swizzle
  // are from it. K has as many columns as V or fewer, which lie alike.
  CUTE_DEVICE Cached* place_in(Cached* stage, int row) const {
    if constexpr (Traits::is_e4m3)
      return stage + Traits::CachedTile::offset(row, lane_column);
    else
      return &smem_tile<typename Traits::ValueLayout>(stage)(row, lane_column);
  }
  CUTE_DEVICE static auto distance(int rows, int columns) {
    if constexpr (Traits::is_e4m3)
      return Traits::CachedTile::distance(rows, columns);
    else
      return get_nonswizzle_portion(typename Traits::ValueLayout{})(rows, columns);
  }

  CUTE_DEVICE bool has_key(int key_begin) const {
    const int key = key_begin + lane;
    return lane < slice && key >= span.begin && key < span.end;
  }

  static CUTE_DEVICE void copy_vector(const Cached* source, bool exists, Cached* target) {
    SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(*reinterpret_cast<const uint128_t*>(source),
                                                     *reinterpret_cast<uint128_t*>(target), exists);
  }

  // Of rows from `first` on those that has_row(row of this lane's first) says; the others become
  // zeros.
  template <class HasRow>
  CUTE_DEVICE void copy_consecutive(Cached* stage, KeyPlace const& first, HasRow has_row) const {
    const TensorView& k = params.k;
    const TensorView& v = params.v;
    const Cached* k_row = k_begin + first.batch * k.batch_stride + first.row * k.row_stride;
    const Cached* v_row = v_begin + first.batch * v.batch_stride + first.row * v.row_stride;
    const int columns = first.exists() ? params.shape.head_dim - k_column - lane_column : 0;
    const int columns_v = first.exists() ? params.shape.head_dim_v - v_column - lane_column : 0;
    constexpr int phases =
        atom_rows / rows_per_pass;  // rows of the swizzle atom that a lane writes
    Cached* targets[phases];
    CUTE_UNROLL
    for (int phase = 0; phase < phases; ++phase)
      targets[phase] = place_in(stage, lane_row + phase * rows_per_pass);
    CUTE_UNROLL
    for (int row = 0; row < slice; row += rows_per_pass) {
      const bool exists = has_row(row);
      CUTE_UNROLL
      for (int column = 0; column < Traits::value_columns; column += atom_columns) {
        Cached* target = targets[row % atom_rows / rows_per_pass] +
                         distance(row / atom_rows * atom_rows, column);
        if (column < Traits::key_columns)
          copy_vector(k_row + column, exists && column < columns, target);
        copy_vector(v_row + column, exists && column < columns_v, target + Traits::key_elements);
      }
      k_row += rows_per_pass * k.row_stride;
      v_row += rows_per_pass * v.row_stride;
    }
  }

  // place: of this lane's key.
  CUTE_DEVICE void copy_scattered(Cached* stage, KeyPlace place, bool is_wanted, float* scales) {
    constexpr std::int64_t none = -1;
    std::int64_t k_offset = none;
    std::int64_t v_offset = none;
    bool is_missing = false;
    if (is_wanted) {
      place = rows.checked(place, params.errors);
      is_missing = !place.exists();
      if (!is_missing) {
        k_offset = place.offset(params.k, head);
        v_offset = place.offset(params.v, head);
      }
    }
    misses = misses || __any_sync(0xffffffffu, is_missing);
    if constexpr (Traits::has_lists) present = __ballot_sync(0xffffffffu, k_offset != none);
    if (Traits::lists_blocks && present == 0) return;
    if constexpr (Traits::is_e4m3) {
      copy_vectors(stage, k_offset, v_offset);
      copy_scales(k_offset == none ? KeyPlace{} : place, scales);
    } else if (converts()) {
      if constexpr (Traits::is_latent) {
        copy_vectors</*kHasValues=*/false>(stage, k_offset, v_offset);
        convert_values(stage + Traits::key_elements, v_offset, place);
        if (params.values_include_rope) copy_rotary_values(stage + Traits::key_elements, k_offset);
      }
    } else if (has_vector_rows) {
      copy_vectors(stage, k_offset, v_offset);
    } else {
      copy_elements(stage, k_offset, v_offset);
    }
  }

  template <bool kHasValues = true>
  CUTE_DEVICE void copy_vectors(Cached* stage, std::int64_t k_offset, std::int64_t v_offset) const {
    const auto* k_data = static_cast<const Cached*>(params.k.data) + k_column + lane_column;
    const auto* v_data = static_cast<const Cached*>(params.v.data) + v_column + lane_column;
#pragma unroll 1
    for (int row = lane_row; row < slice; row += rows_per_pass) {
      const std::int64_t k_row = __shfl_sync(0xffffffffu, k_offset, row);
      const std::int64_t v_row = __shfl_sync(0xffffffffu, v_offset, row);
      const int columns = k_row >= 0 ? params.shape.head_dim - k_column - lane_column : 0;
      const int columns_v = k_row >= 0 ? params.shape.head_dim_v - v_column - lane_column : 0;
      Cached* first = place_in(stage, row);
      CUTE_UNROLL
      for (int column = 0; column < Traits::value_columns; column += atom_columns) {
        Cached* target = first + distance(0, column);
        if (column < Traits::key_columns)
          copy_vector(k_data + k_row + column, column < columns, target);
        if constexpr (kHasValues)
          copy_vector(v_data + v_row + column, column < columns_v, target + Traits::key_elements);
      }
    }
  }

  // Of a row, whose scales begin at an offset.
  CUTE_DEVICE float scale_at(LatentScales const& scales, std::int64_t offset, int column) const {
    ScaleView const& view = params.scales.v;
    if (!view.is_e8m0) return scales.at(offset, column);
    int own_head = head;
    asm volatile("" : "+r"(own_head));  // as in convert_values
    offset +=
        own_head * view.head_stride + std::int64_t{column >> view.group_shift} * view.group_stride;
    return number_of_scale(reinterpret_cast<const std::uint8_t*>(view.data)[offset]);
  }

  // Values of e4m3 times their scales, rounded once. 16 columns of a row are a lane's at a time.
  // Those of no value are zeros, or copy_rotary_values writes them. place: of this lane's key, if
  // it exists.
  CUTE_DEVICE void convert_values(Cached* target, std::int64_t v_offset, KeyPlace place) const {
    using Element = typename Traits::Element;
    constexpr int columns = 16;
    constexpr int lanes_per_row = Traits::value_columns / columns;
    constexpr int rows_at_once = 32 / lanes_per_row;
    constexpr int loads = 4;  // under way
    static_assert(32 % lanes_per_row == 0 && slice % (loads * rows_at_once) == 0);
    const auto scales = LatentScales::of(params.scales.v, sequence, head);
    const std::int64_t scale_offset = v_offset < 0 ? 0 : scales.offset(place.batch, place.row);
    int own = lane;
    asm volatile("" : "+r"(own));  // what follows is not kept from slice to slice: that spills
    const int column = own % lanes_per_row * columns;
    const bool has_column = column < columns_of_v(params) - v_column;
    const bool is_written = has_column || !params.values_include_rope;
    const auto* data = static_cast<const std::uint8_t*>(params.v.data) + v_column + column;
    auto tile = smem_tile<typename Traits::ValueLayout>(target);
#pragma unroll 1
    for (int first = own / lanes_per_row; first < slice; first += loads * rows_at_once) {
      uint4 codes[loads];
      float factors[loads];
      CUTE_UNROLL
      for (int i = 0; i < loads; ++i) {
        const int row = first + i * rows_at_once;
        const std::int64_t begin = __shfl_sync(0xffffffffu, v_offset, row);
        const std::int64_t of_row = __shfl_sync(0xffffffffu, scale_offset, row);
        const bool exists = begin >= 0 && has_column;
        codes[i] = exists ? *reinterpret_cast<const uint4*>(data + begin) : uint4{};
        factors[i] = exists ? scale_at(scales, of_row, v_column + column) : 0.0f;
      }
      CUTE_UNROLL
      for (int i = 0; i < loads; ++i) {
        const int row = first + i * rows_at_once;
        const std::uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
        std::uint32_t pairs[8];
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j) {
          const auto code = static_cast<std::uint16_t>(words[j / 2] >> 16 * (j % 2));
          const float2 values = __half22float2(half2_of_e4m3(code));
          pairs[j] = pair_of<Element>({values.x * factors[i], values.y * factors[i]});
        }
        if (!is_written) continue;
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          *reinterpret_cast<uint4*>(&tile(row, column + 8 * half)) = {
              pairs[4 * half], pairs[4 * half + 1], pairs[4 * half + 2], pairs[4 * half + 3]};
        }
      }
    }
  }

  // Keys' columns as values, behind those of V, and zeros behind them. k_offset: of this lane's
  // key.
  CUTE_DEVICE void copy_rotary_values(Cached* target, std::int64_t k_offset) const {
    constexpr int lanes_per_row = 8;
    int first = v_column;
    asm volatile("" : "+r"(first));  // as in convert_values
    const int behind = columns_of_v(params) - first;
    const auto* data = static_cast<const Cached*>(params.k.data) - behind;
    auto tile = smem_tile<typename Traits::ValueLayout>(target);
#pragma unroll 1
    for (int row = lane / lanes_per_row; row < slice; row += 32 / lanes_per_row) {
      const std::int64_t k_row = __shfl_sync(0xffffffffu, k_offset, row);
      const int end = k_row >= 0 ? params.shape.head_dim_v - first : 0;
#pragma unroll 1
      for (int column = max(behind, 0) + lane % lanes_per_row * chunk;
           column < Traits::value_columns; column += lanes_per_row * chunk)
        copy_vector(data + k_row + column, column < end, &tile(row, column));
    }
  }

  CUTE_DEVICE void copy_elements(Cached* stage, std::int64_t k_offset,
                                 std::int64_t v_offset) const {
    auto tile = smem_tile<typename Traits::ValueLayout>(reinterpret_cast<Bits*>(stage));
    constexpr int rows_in_flight = 4;
    const auto* k_data = static_cast<const Bits*>(params.k.data) + k_column;
    const auto* v_data = static_cast<const Bits*>(params.v.data) + v_column;
#pragma unroll 1
    for (int first = 0; first < slice; first += rows_in_flight) {
#pragma unroll 1
      for (int column = lane; column < Traits::value_columns; column += 32) {
        const bool has_k =
            Traits::key_columns == Traits::value_columns || column < Traits::key_columns;
        Bits k_bits[rows_in_flight];
        Bits v_bits[rows_in_flight];
        CUTE_UNROLL
        for (int i = 0; i < rows_in_flight; ++i) {
          const std::int64_t k_row = __shfl_sync(0xffffffffu, k_offset, first + i);
          const std::int64_t v_row = __shfl_sync(0xffffffffu, v_offset, first + i);
          const bool exists = has_k && k_row >= 0 && column < params.shape.head_dim - k_column;
          const bool exists_v = k_row >= 0 && column < params.shape.head_dim_v - v_column;
          k_bits[i] = exists ? k_data[k_row + column] : Bits{0};
          v_bits[i] = exists_v ? v_data[v_row + column] : Bits{0};
        }
        CUTE_UNROLL
        for (int i = 0; i < rows_in_flight; ++i) {
          Bits* target = &tile(first + i, column);
          if (has_k) target[0] = k_bits[i];
          target[Traits::key_elements] = v_bits[i];
        }
      }
    }
  }

  ForwardParams const& params;
  const KeyRows rows;
  const KeySpan span;
  const int head;
  const int sequence;
  const int k_column;  // of the tensors, the warp's first
  const int v_column;
  const int lane;
  const int lane_row;  // this lane's first vector of a tile
  const int lane_column;
  const Cached* const k_begin;  // of the head, from the lane's vector on
  const Cached* const v_begin;
  const bool has_vector_rows;
  const bool has_consecutive_rows;  // and vectors
  const KeyList list;
  const int* const sequence_of_list;
  int entry = KeyList::none;  // this lane's of the slice after that to come
  bool is_listed = false;     // whether the list names a key for `next`
  unsigned present = 0;
  // Of lists of blocks. Where whole slices lie in a block, all lanes have a slice's first key.
  ListedBlocks blocks;
  bool has_runs = false;
  unsigned seen_of_run = 0;  // keys from that of `next` on that the query sees
  KeyPlace next{};           // of this lane's key of the slice to come, or of its first one
  bool misses = false;
};

}  // namespace flash_attn_cuda::sm80
