// How paged attention is cut into tasks. Two kernels compute them: attention_decode.cpp (one query) and
// attention_prefill.cpp (a tile of queries); both keep an online softmax over tiles of keys (Flash Attention).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"

namespace mlserve {

constexpr int64_t kKeyTile = 64;  // keys whose scores are held at once

// One task: some queries of one sequence against a range of its keys.
//
// Its rows are (query, query head) pairs: row r is query first_query + r / heads and head first_head + r % heads.
struct AttentionTask {
  int64_t first_query, queries;  // rows of q and out
  int64_t first_position;        // position of first_query in the sequence
  int64_t first_head, heads;     // query heads; decode takes all of them, prefill those of one KV head
  int64_t first_key, end_key;    // positions
  const int32_t* blocks;         // the sequence's block table

  int64_t rows() const { return queries * heads; }
};

// The online softmax of a task's rows: out = sum(exp(score - peak) * value), not yet divided by total.
struct SoftmaxState {
  float* out;    // [rows, width], width = head_dim rounded up to a panel
  float* peak;   // [rows]
  float* total;  // [rows]
};

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using AlignedFloats = std::unique_ptr<float[], Free>;

// Uninitialised, and aligned to cache lines: a vector that straddles two lines costs two loads.
inline AlignedFloats aligned_floats(int64_t count) {
  auto* p = static_cast<float*>(std::aligned_alloc(64, divide_up(count, 16) * 64));
  if (!p) throw std::bad_alloc();
  return AlignedFloats(p);
}

// A buffer of the calling thread that only grows; what it holds is undefined.
float* thread_scratch(int64_t count);

// Where the keys [begin, begin + count) of a sequence stand, for KV head 0; `count` <= kKeyTile. Values stand
// kv.value_offset later. rows[count ..] up to a multiple of 8 repeat the last row, so that kernels may over-read safely.
template <class T>
inline void find_keys(const PagedKV& kv, const int32_t* blocks, int64_t begin, int64_t count, const T** rows) {
  int64_t block = begin / kv.block_size, offset = begin % kv.block_size;
  const T* data = static_cast<const T*>(kv.data);
  for (int64_t j = 0; j < count; ++j) {
    rows[j] = data + blocks[block] * kv.block_stride + offset * kv.token_stride;
    if (++offset == kv.block_size) {
      offset = 0;
      ++block;
    }
  }
  for (int64_t j = count; j % kLanes != 0; ++j) rows[j] = rows[count - 1];
}

void attend_decode(const AttentionTask& task, Heads q, const PagedKV& kv, const AttentionOptions& options,
                   SoftmaxState state);
void attend_prefill(const AttentionTask& task, Heads q, const PagedKV& kv, const AttentionOptions& options,
                    SoftmaxState state);

}  // namespace mlserve
