// Attention of one query per sequence: bound by reading KV once, so all heads that share a KV head take each key and
// value from registers, three heads at a time.
#include <algorithm>
#include <cmath>

#include "attention.h"

namespace mlserve {
namespace {

constexpr int kMaxHeads = 3;  // 3 heads x 4 keys (or 4 vectors of a value) fill 12 of the 16 registers

// scores[h][j] = q[h] . key[j]; keys are taken four at a time, the last four may repeat a key
template <int kHeads, class T>
void score(const float* q, int64_t head_dim, const T* const* keys, int64_t count, int64_t offset, float* scores) {
  for (int64_t j = 0; j < count; j += 4) {
    Vec sums[kHeads][4];
    for (auto& head : sums) head[0] = head[1] = head[2] = head[3] = zero();
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Vec query[kHeads];
#pragma GCC unroll 3
      for (int h = 0; h < kHeads; ++h) query[h] = load(q + h * head_dim + d);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Vec key = load(keys[j + i] + offset + d);
#pragma GCC unroll 3
        for (int h = 0; h < kHeads; ++h) sums[h][i] = fma(query[h], key, sums[h][i]);
      }
    }
#pragma GCC unroll 3
    for (int h = 0; h < kHeads; ++h) {
      _mm_storeu_ps(scores + h * kKeyTile + j, sum4(sums[h][0], sums[h][1], sums[h][2], sums[h][3]));
    }
  }
}

// out[h] += sum over j of weights[h][j] * value[j], for kVecs vectors of the head at a time
template <int kHeads, int kVecs, class T>
void add_values(const float* weights, const T* const* keys, int64_t count, int64_t offset, float* out, int64_t width) {
  Vec sums[kHeads][kVecs];
#pragma GCC unroll 3
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sums[h][v] = load(out + h * width + v * kLanes);
  }
  for (int64_t j = 0; j < count; ++j) {
    Vec weight[kHeads];
#pragma GCC unroll 3
    for (int h = 0; h < kHeads; ++h) weight[h] = splat(weights[h * kKeyTile + j]);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const Vec value = load(keys[j] + offset + v * kLanes);
#pragma GCC unroll 3
      for (int h = 0; h < kHeads; ++h) sums[h][v] = fma(weight[h], value, sums[h][v]);
    }
  }
#pragma GCC unroll 3
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(out + h * width + v * kLanes, sums[h][v]);
  }
}

void cap_scores(float* scores, int64_t count, float cap) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec capped = _mm256_mul_ps(splat(cap), tanh(_mm256_mul_ps(load(scores + j), splat(1.0f / cap))));
    store(scores + j, capped);
  }
}

// Turns one head's scores into weights and rescales what it has summed so far to the new peak.
void softmax(float* scores, int64_t count, float* peak, float* total, float* out, int64_t width) {
  for (int64_t j = count; j % kLanes != 0; ++j) scores[j] = -INFINITY;
  Vec highest = splat(*peak);
  for (int64_t j = 0; j < count; j += kLanes) highest = _mm256_max_ps(highest, load(scores + j));
  const float new_peak = max(highest);
  Vec sums = zero();
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec weight = exp(_mm256_sub_ps(load(scores + j), splat(new_peak)));
    store(scores + j, weight);
    sums = _mm256_add_ps(sums, weight);
  }
  if (new_peak != *peak) {
    const float scale = std::exp(*peak - new_peak);
    for (int64_t d = 0; d < width; d += kLanes) store(out + d, _mm256_mul_ps(load(out + d), splat(scale)));
    *total *= scale;
    *peak = new_peak;
  }
  *total += sum(sums);
}

template <class T>
struct KeyTile {
  const T* rows[kKeyTile];
  int64_t count;
};

// kHeads query heads of one KV head against one tile of keys.
template <int kHeads, class T>
void attend_tile(const float* q, const KeyTile<T>& tile, int64_t head_offset, const PagedKV& kv,
                 const AttentionOptions& options, SoftmaxState state, int64_t width) {
  alignas(32) float scores[kHeads * kKeyTile];
  score<kHeads>(q, kv.head_dim, tile.rows, tile.count, head_offset, scores);
  for (int h = 0; h < kHeads; ++h) {
    float* row = scores + h * kKeyTile;
    if (options.has_soft_cap) cap_scores(row, tile.count, options.soft_cap);
    softmax(row, tile.count, state.peak + h, state.total + h, state.out + h * width, width);
  }
  int64_t d = 0;
  const int64_t offset = head_offset + kv.value_offset;
  for (; d + 4 * kLanes <= kv.head_dim; d += 4 * kLanes) {
    add_values<kHeads, 4>(scores, tile.rows, tile.count, offset + d, state.out + d, width);
  }
  for (; d < kv.head_dim; d += kLanes) {
    add_values<kHeads, 1>(scores, tile.rows, tile.count, offset + d, state.out + d, width);
  }
}

template <class T>
void attend(const AttentionTask& task, Heads q, const PagedKV& kv, const AttentionOptions& options,
            SoftmaxState state) {
  const int64_t head_dim = kv.head_dim, width = divide_up(head_dim, 16) * 16, group = task.heads / kv.kv_heads;
  float* scaled_q = thread_scratch(task.heads * head_dim);
  for (int64_t h = 0; h < task.heads; ++h) {
    const float* row = q.data + task.first_query * q.token_stride + h * q.head_stride;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store(scaled_q + h * head_dim + d, _mm256_mul_ps(load(row + d), splat(options.scale)));
    }
  }
  KeyTile<T> tile;
  for (int64_t key = task.first_key; key < task.end_key; key += kKeyTile) {
    tile.count = std::min(kKeyTile, task.end_key - key);
    find_keys(kv, task.blocks, key, tile.count, tile.rows);
    for (int64_t head = 0; head < task.heads;) {
      const int64_t left = group - head % group;
      const SoftmaxState rows{state.out + head * width, state.peak + head, state.total + head};
      const float* head_q = scaled_q + head * head_dim;
      const int64_t offset = head / group * kv.head_stride;
      if (left >= kMaxHeads) {
        attend_tile<3>(head_q, tile, offset, kv, options, rows, width);
        head += 3;
      } else if (left == 2) {
        attend_tile<2>(head_q, tile, offset, kv, options, rows, width);
        head += 2;
      } else {
        attend_tile<1>(head_q, tile, offset, kv, options, rows, width);
        head += 1;
      }
    }
  }
}

}  // namespace

void attend_decode(const AttentionTask& task, Heads q, const PagedKV& kv, const AttentionOptions& options,
                   SoftmaxState state) {
  with_type(kv.dtype, [&](auto type) { attend<decltype(type)>(task, q, kv, options, state); });
}

}  // namespace mlserve
