// Attention of a tile of queries: the rows (query, head of the group) meet tiles of keys that are laid out as panels, so
// that both products run in the kernel of panels.h.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "panels.h"

namespace mlserve {
namespace {

constexpr int64_t kKeyTile = 64;  // keys whose scores are held at once

inline void transpose8(Vec (&r)[8]) {
  Vec t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

// Keys as panels [key / 16][head_dim][16]. Of an odd last half panel the other half keeps what it held: those scores
// are never looked at.
template <class T>
void pack_keys(const T* const* keys, int64_t count, int64_t offset, int64_t head_dim, float* panels) {
  for (int64_t j = 0; j < count; j += kLanes) {
    float* panel = panels + j / kPanelColumns * head_dim * kPanelColumns + j % kPanelColumns;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Vec block[8];
      for (int i = 0; i < 8; ++i) block[i] = load(keys[j + i] + offset + d);
      transpose8(block);
      for (int i = 0; i < 8; ++i) store(panel + (d + i) * kPanelColumns, block[i]);
    }
  }
}

// Values as panels [head_dim / 16][kKeyTile][16]. If head_dim is an odd multiple of 8 the last panel's other half stays
// as it is: it only meets the padding of the output's rows.
template <class T>
void pack_values(const T* const* keys, int64_t count, int64_t offset, int64_t head_dim, float* panels) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    float* panel = panels + d / kPanelColumns * kKeyTile * kPanelColumns + d % kPanelColumns;
    for (int64_t j = 0; j < count; ++j) store(panel + j * kPanelColumns, load(keys[j] + offset + d));
  }
}

// The keys of a tile that one row may see: [begin, end), relative to the tile.
struct Visible {
  int64_t begin, end;
};

class QueryTile {
 public:
  QueryTile(const AttentionTask& task, Heads q, const AttentionOptions& options, int64_t head_dim, SoftmaxState state)
      : task_(task), options_(options), state_(state), head_dim_(head_dim),
        width_(padded_width(head_dim)), rows_(task.rows()) {
    q_ = thread_scratch(rows_ * (head_dim_ + kKeyTile) + kKeyTile * (head_dim_ + width_));
    scores_ = q_ + rows_ * head_dim_;
    keys_ = scores_ + rows_ * kKeyTile;
    values_ = keys_ + kKeyTile * head_dim_;
    scale_queries(task, q, head_dim, options.scale, q_);
  }

  template <class T>
  void attend(const T* const* keys, int64_t first_key, int64_t count, int64_t key_offset, int64_t value_offset) {
    pack_keys(keys, count, key_offset, head_dim_, keys_);
    pack_values(keys, count, value_offset, head_dim_, values_);
    score(first_key, count);
    for (int64_t r = 0; r < rows_; ++r) softmax(r, visible(r, first_key, count), count);
    add_values(first_key, count);
  }

 private:
  Visible visible(int64_t row, int64_t first_key, int64_t count) const {
    const int64_t position = task_.first_position + row / task_.heads;
    const int64_t begin = position < options_.window ? 0 : position - options_.window + 1;
    return {std::max<int64_t>(begin - first_key, 0), std::min(task_.visible_end(row / task_.heads) - first_key, count)};
  }

  int64_t first_query_that_sees(int64_t key) const {
    if (!task_.visible_ends) return std::max<int64_t>(key - task_.first_position, 0);
    return std::upper_bound(task_.visible_ends, task_.visible_ends + task_.queries, key) - task_.visible_ends;
  }

  // scores = q @ keys, but for the rows that come before a panel's first key
  void score(int64_t first_key, int64_t count) {
    for (int64_t j = 0; j < count; j += kPanelColumns) {
      const int64_t hidden_queries = first_query_that_sees(first_key + j);
      for (int64_t r = hidden_queries * task_.heads; r < rows_; r += kTileRows) {
        const float* panel = keys_ + j * head_dim_;
        multiply_tile<RowLayout::kRows>(std::min<int64_t>(kTileRows, rows_ - r),
                                        TileArgs<float>{.x = q_ + r * head_dim_,
                                                        .x_stride = head_dim_,
                                                        .panel = panel,
                                                        .depth = head_dim_,
                                                        .start = kZeroColumns,
                                                        .start_stride = 0,
                                                        .y = scores_ + r * kKeyTile + j,
                                                        .y_stride = kKeyTile,
                                                        .prefetch = {reinterpret_cast<const char*>(panel), 0}});
      }
    }
  }

  // Turns a row's scores into weights; 0 where it may not look.
  void softmax(int64_t row, Visible seen, int64_t count) {
    float* scores = scores_ + row * kKeyTile;
    const int64_t end = std::max<int64_t>(seen.end, 0), padded = divide_up(end, kLanes) * kLanes;
    std::fill(scores + padded, scores + std::max(padded, count), 0.0f);
    if (seen.begin >= end) {
      std::fill(scores, scores + padded, 0.0f);
      return;
    }
    const int64_t begin = seen.begin / kLanes * kLanes;
    std::fill(scores, scores + begin, 0.0f);
    softmax_row(scores + begin, seen.begin - begin, end - begin, options_, state_.row(row, width_), width_);
  }

  // out += weights @ values; a tile of rows stops at the last key that its last row sees
  void add_values(int64_t first_key, int64_t count) {
    for (int64_t d = 0; d < width_; d += kPanelColumns) {
      const float* panel = values_ + d * kKeyTile;
      for (int64_t r = 0; r < rows_; r += kTileRows) {
        const int64_t rows = std::min<int64_t>(kTileRows, rows_ - r);
        float* out = state_.out + r * width_ + d;
        const int64_t seen = visible(r + rows - 1, first_key, count).end;
        multiply_tile<RowLayout::kRows>(rows, TileArgs<float>{.x = scores_ + r * kKeyTile,
                                                              .x_stride = kKeyTile,
                                                              .panel = panel,
                                                              .depth = std::max<int64_t>(seen, 0),
                                                              .start = out,
                                                              .start_stride = width_,
                                                              .y = out,
                                                              .y_stride = width_,
                                                              .prefetch = {reinterpret_cast<const char*>(panel), 0}});
      }
    }
  }

  const AttentionTask& task_;
  const AttentionOptions& options_;
  SoftmaxState state_;
  int64_t head_dim_, width_, rows_;
  float *q_, *scores_, *keys_, *values_;  // thread scratch
};

}  // namespace

void attend_prefill(const AttentionTask& task, Heads q, const PagedKV& kv, const AttentionOptions& options,
                    SoftmaxState state) {
  QueryTile tile(task, q, options, kv.head_dim, state);
  const int64_t key_offset = task.first_head / task.heads * kv.head_stride;
  with_type(kv.dtype, [&](auto type) {
    const decltype(type)* keys[kKeyTile];
    for (int64_t key = task.first_key; key < task.end_key; key += kKeyTile) {
      const int64_t count = std::min(kKeyTile, task.end_key - key);
      find_keys(kv, task.blocks, key, count, keys);
      tile.attend(keys, key, count, key_offset, key_offset + kv.value_offset);
    }
  });
}

}  // namespace mlserve
