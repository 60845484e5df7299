// How paged attention is cut into tasks. Two kernels compute them: attention_decode.cpp (one query) and
// attention_prefill.cpp (a tile of queries); both keep an online softmax over tiles of keys (Flash Attention).
#pragma once

#include <cstdint>

#include "kernels.h"
#include "scratch.h"

namespace mlserve {

// One task: some queries of one sequence against a range of its keys.
//
// Its rows are (query, query head) pairs: row r is query first_query + r / heads and head first_head + r % heads.
struct AttentionTask {
  int64_t first_query, queries;  // rows of q and out
  int64_t first_position;        // position of first_query in the sequence
  int64_t first_head, heads;     // query heads; decode takes all of them, prefill those of one KV head
  int64_t first_key, end_key;    // positions
  const int32_t* blocks;         // the sequence's block table
  const int32_t* visible_ends;   // of its queries, never falling; null if none sees beyond itself

  int64_t rows() const { return queries * heads; }
  int64_t visible_end(int64_t query) const { return visible_ends ? visible_ends[query] : first_position + query + 1; }
};

// Numbers in a row of sums: head_dim, rounded up to a panel (see panels.h).
inline int64_t padded_width(int64_t head_dim) { return divide_up(head_dim, 16) * 16; }

// The online softmax of one row: out = sum(exp(score - peak) * value), not yet divided by total.
struct SoftmaxRow {
  float *out, *peak, *total;
};

// Of all rows of a task.
struct SoftmaxState {
  float* out;    // [rows, width]
  float* peak;   // [rows]
  float* total;  // [rows]

  SoftmaxRow row(int64_t r, int64_t width) const { return {out + r * width, peak + r, total + r}; }
};

// Takes a row's scores of keys [0, count): caps them, turns them into weights relative to the new peak, and rescales
// what the row has summed so far. In place; weights are 0 for the first `hidden` keys and up to a multiple of 8.
void softmax_row(float* scores, int64_t hidden, int64_t count, const AttentionOptions& options, SoftmaxRow row,
                 int64_t width);

// scaled[row, :] = scale * its query, for a task's rows
void scale_queries(const AttentionTask& task, Heads q, int64_t head_dim, float scale, float* scaled);

// Where the keys [begin, begin + count) of a sequence stand, for KV head 0; Values stand kv.value_offset
// later. rows[count ..] up to a multiple of 8 repeat the last row, so that kernels may over-read safely.
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
