// Attention of one query per sequence: bound by reading KV once, so all heads that share a KV head take each key and
// value from registers, three heads at a time.
//
// The hardware doesn't guess that one block follows another, so lines are asked for ahead: values of a tile while its
// keys are scored, keys of the next while values are added. They are asked for evenly, as a processor waits for few at
// once, and in the order in which they lie, as memory answers that soonest.
#include <algorithm>
#include <cmath>

#include "attention.h"

namespace mlserve {
namespace {

constexpr int64_t kTile = 32;   // keys whose scores are held at once
constexpr int kMaxHeads = 3;    // 3 heads x 4 keys (or 4 vectors of a value) fill 12 of the 16 registers
constexpr int64_t kKeyStep = 4;

template <class T>
struct KeyTile {
  const T* rows[kTile];  // as of find_keys
  int64_t count;
};

// Asks for a tile's keys, or its values, a few lines each time.
template <class T>
class LineFetcher {
 public:
  // `group`: query heads of a KV head. Products come in runs of up to kMaxHeads heads; with `stride` every run asks for
  // its part of what it reads.
  LineFetcher(const PagedKV& kv, int64_t group)
      : row_bytes_(kv.token_stride * sizeof(T)), stride_(kLine / divide_up(group, kMaxHeads)) {}

  // From now on the rows of a tile, `offset` numbers from where its keys start.
  void start(const KeyTile<T>& tile, int64_t offset) {
    num_pieces_ = 0;
    for (int64_t j = 0; j < tile.count; ++j) {
      const char* row = reinterpret_cast<const char*>(tile.rows[j] + offset);
      if (num_pieces_ == 0 || pieces_[num_pieces_ - 1].end != row) pieces_[num_pieces_++] = {row, row};
      pieces_[num_pieces_ - 1].end += row_bytes_;
    }
    next_ = 0;
    next_piece();
  }

  // Called once for every kLanes numbers of kKeyStep keys, or for 4 vectors of one value. Inlined, as GCC drops calls of
  // functions that only prefetch.
  __attribute__((always_inline)) void step() {
#pragma GCC unroll 2
    for (std::size_t i = 0; i < sizeof(T) / 2; ++i) {
      _mm_prefetch(at_, _MM_HINT_T0);
      at_ += step_;
      if (at_ >= end_) next_piece();
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Piece {
    const char *at, *end;
  };

  void next_piece() {
    if (next_ < num_pieces_) {
      at_ = pieces_[next_].at;
      end_ = pieces_[next_++].end;
      step_ = stride_;
    } else {
      at_ = end_ - 1;
      step_ = 0;
    }
  }

  int64_t row_bytes_, stride_, step_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
  Piece pieces_[kTile];  // of memory that follows one another, such as a block's rows
  int64_t num_pieces_ = 0, next_ = 0;
};

// scores[h][0..4) = q[h] . keys[0..4)
template <int kHeads, class T>
inline void score(const float* q, int64_t head_dim, const T* const* keys, int64_t offset, LineFetcher<T>& fetcher,
                  float* scores) {
  Vec sums[kHeads][kKeyStep];
  for (auto& head : sums) head[0] = head[1] = head[2] = head[3] = zero();
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    Vec query[kHeads];
#pragma GCC unroll 3
    for (int h = 0; h < kHeads; ++h) query[h] = load(q + h * head_dim + d);
    fetcher.step();
#pragma GCC unroll 4
    for (int i = 0; i < kKeyStep; ++i) {
      const Vec key = load(keys[i] + offset + d);
#pragma GCC unroll 3
      for (int h = 0; h < kHeads; ++h) sums[h][i] = fma(query[h], key, sums[h][i]);
    }
  }
#pragma GCC unroll 3
  for (int h = 0; h < kHeads; ++h) {
    _mm_storeu_ps(scores + h * kTile, sum4(sums[h][0], sums[h][1], sums[h][2], sums[h][3]));
  }
}

// out[h] += sum over j of weights[h][j] * value[j], for the kVecs vectors of the head from d on. `offset`: the values'.
template <int kHeads, int kVecs, class T>
inline void add_vectors(const float* weights, const KeyTile<T>& tile, int64_t offset, int64_t d, LineFetcher<T>& fetcher,
                        float* out, int64_t width) {
  Vec sums[kHeads][kVecs];
#pragma GCC unroll 3
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sums[h][v] = load(out + h * width + d + v * kLanes);
  }
  for (int64_t j = 0; j < tile.count; ++j) {
    Vec weight[kHeads];
#pragma GCC unroll 3
    for (int h = 0; h < kHeads; ++h) weight[h] = splat(weights[h * kTile + j]);
    if constexpr (kVecs == 4) fetcher.step();
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const Vec value = load(tile.rows[j] + offset + d + v * kLanes);
#pragma GCC unroll 3
      for (int h = 0; h < kHeads; ++h) sums[h][v] = fma(weight[h], value, sums[h][v]);
    }
  }
#pragma GCC unroll 3
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(out + h * width + d + v * kLanes, sums[h][v]);
  }
}

// The same for the whole head.
template <int kHeads, class T>
inline void add_values(const float* weights, const KeyTile<T>& tile, int64_t offset, int64_t head_dim,
                       LineFetcher<T>& fetcher, float* out, int64_t width) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    add_vectors<kHeads, 4>(weights, tile, offset, d, fetcher, out, width);
  }
  for (; d < head_dim; d += kLanes) add_vectors<kHeads, 1>(weights, tile, offset, d, fetcher, out, width);
}

template <class T>
class Decoder {
 public:
  Decoder(const AttentionTask& task, Heads q, const PagedKV& kv, const AttentionOptions& options, SoftmaxState state)
      : task_(task), kv_(kv), options_(options), state_(state), group_(task.heads / kv.kv_heads),
        width_(padded_width(kv.head_dim)) {
    q_ = thread_scratch(task.heads * (kv.head_dim + kTile));
    scores_ = q_ + task.heads * kv.head_dim;
    scale_queries(task, q, kv.head_dim, options.scale, q_);
  }

  void run() {
    KeyTile<T> tiles[2];
    load_tile(task_.first_key, tiles[0]);
    for (int64_t key = task_.first_key, i = 0; key < task_.end_key; key += kTile, ++i) {
      KeyTile<T>&tile = tiles[i % 2], &next = tiles[(i + 1) % 2];
      load_tile(key + kTile, next);
      attend(tile, next.count > 0 ? next : tile);
    }
  }

 private:
  // The task's keys from `key` on; none if that is past its end.
  void load_tile(int64_t key, KeyTile<T>& tile) const {
    tile.count = std::clamp<int64_t>(task_.end_key - key, 0, kTile);
    if (tile.count == 0) return;
    find_keys(kv_, task_.blocks, key, tile.count, tile.rows);
  }

  void attend(const KeyTile<T>& tile, const KeyTile<T>& next) {
    LineFetcher<T> fetcher(kv_, group_);  // not a member, or it would live in memory
    fetcher.start(tile, kv_.value_offset);
    for (int64_t j = 0; j < tile.count; j += kKeyStep) {
      for_head_runs([&](auto heads, int64_t head, int64_t offset) {
        score<heads>(q_ + head * kv_.head_dim, kv_.head_dim, tile.rows + j, offset, fetcher,
                     scores_ + head * kTile + j);
      });
    }
    for (int64_t head = 0; head < task_.heads; ++head) {
      softmax_row(scores_ + head * kTile, 0, tile.count, options_, state_.row(head, width_), width_);
    }
    fetcher.start(next, 0);
    for_head_runs([&](auto heads, int64_t head, int64_t offset) {
      add_values<heads>(scores_ + head * kTile, tile, offset + kv_.value_offset, kv_.head_dim, fetcher,
                        state_.out + head * width_, width_);
    });
  }

  // run(number of heads, first head, where its KV head starts in a row), for runs of up to 3 heads of a group
  template <class Run>
  void for_head_runs(const Run& run) const {
    for (int64_t head = 0; head < task_.heads;) {
      const int64_t left = group_ - head % group_, offset = head / group_ * kv_.head_stride;
      if (left >= kMaxHeads) {
        run(std::integral_constant<int, 3>{}, head, offset);
        head += 3;
      } else if (left == 2) {
        run(std::integral_constant<int, 2>{}, head, offset);
        head += 2;
      } else {
        run(std::integral_constant<int, 1>{}, head, offset);
        head += 1;
      }
    }
  }

  const AttentionTask& task_;
  const PagedKV& kv_;
  const AttentionOptions& options_;
  SoftmaxState state_;
  int64_t group_, width_;
  float *q_, *scores_;  // thread scratch: [heads, head_dim], [heads, kTile]
};

}  // namespace

void attend_decode(const AttentionTask& task, Heads q, const PagedKV& kv, const AttentionOptions& options,
                   SoftmaxState state) {
  with_type(kv.dtype, [&](auto type) { Decoder<decltype(type)>(task, q, kv, options, state).run(); });
}

}  // namespace mlserve
