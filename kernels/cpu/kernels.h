// What the Python binding calls. Plain pointers and strides (in elements), so that only the binding needs torch's headers.
// Activations are float32. Callers have checked shapes, strides and ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "simd.h"

namespace mlserve {

enum class DType { kFloat32, kBFloat16, kFloat16 };

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t item_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Calls f with a value of the storage type, for its type only.
template <class F>
inline auto with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kBFloat16: return f(BFloat16{});
    case DType::kFloat16: return f(Float16{});
    default: return f(float{});
  }
}

struct ConstRows {
  const float* data;
  int64_t rows;
  int64_t stride;
};

struct MutableRows {
  float* data;
  int64_t rows;
  int64_t stride;
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Some rows and columns of a matrix, wherever they lie.
struct Patch {
  float* data;
  int64_t stride;
  Range rows, columns;

  float* row(int64_t r) const { return data + (r - rows.begin) * stride; }
};

// --- lora.cpp

struct AdapterRows {  // see AdapterSegments in mlserve.kernels
  int64_t count, segments;
  const int64_t* order;
  const int32_t *starts, *slots;
};
struct LoraA {  // [slots, slices, max_rank, in], the last dimension dense; what lies beyond a rank is never read
  DType dtype;
  const void* data;
  int64_t slices, max_rank, in;
  int64_t slot_stride, slice_stride, rank_stride;
  const int32_t* ranks;  // [slots, slices]
};
struct LoraB {  // [slots, max_rank, out], likewise; slice k is columns out_starts[k] to out_starts[k + 1] - 1
  DType dtype;
  const void* data;
  int64_t slices, max_rank;
  int64_t slot_stride, rank_stride;
  const int32_t* ranks;
  const int64_t* out_starts;  // [slices + 1]
};
void lora_shrink(ConstRows x, const LoraA& a, const AdapterRows& rows, float* shrunk);
void lora_expand(const float* shrunk, const LoraB& b, const AdapterRows& rows, MutableRows y);
// The same for a part of y, by one thread.
void lora_expand(const float* shrunk, const LoraB& b, const AdapterRows& rows, const Patch& y);

struct LoraPair {
  LoraA a;
  LoraB b;
  AdapterRows rows;
};

// --- linear.cpp

// Memory in 2 MB pages, handed out piece by piece: weights are read once a step, front to back, and with 4 kB pages
// address translation costs 13 % of that speed. A chunk is freed with the last weight in it.
class WeightArena {
 public:
  std::shared_ptr<void> allocate(std::size_t bytes);

 private:
  std::shared_ptr<char> chunk_;
  std::size_t used_ = 0, size_ = 0;
};

// A weight [out, in] as panels [ceil(out / 16)][in][16] (see panels.h), the last one padded with zeros.
struct PackedLinear {
  DType dtype;
  int64_t out_features, in_features;
  std::shared_ptr<void> panels;
  std::shared_ptr<void> bias;  // float32, padded like the panels; null if there is none
};

PackedLinear pack_linear(WeightArena& arena, DType dtype, const void* weight, int64_t out, int64_t in,
                         const float* bias);

enum class Activation { kNone, kSilu, kGeluTanh };

// y[rows, out] = x @ weight^T + bias, and what adapters add to it (`lora` is null if there are none). With an activation
// the weight is a gate and, below it, as many rows of up: y[rows, out / 2] = activation(gate) * up.
void linear(ConstRows x, const PackedLinear& weight, const LoraPair* lora, Activation activation, float* y);
void embedding(const int64_t* ids, int64_t count, const PackedLinear& table, float* y);

// --- elementwise.cpp

void rms_norm(ConstRows x, int64_t width, DType dtype, const void* weight, float eps, float* y);
void add_rms_norm(ConstRows x, float* residual, int64_t width, DType dtype, const void* weight, float eps, float* y);

struct Heads {  // [tokens, heads, head_dim], the last dimension dense
  float* data;
  int64_t tokens, heads, token_stride, head_stride;
};
void rope(Heads x, const float* cos, const float* sin, int64_t half);

void gated(ConstRows gate_up, int64_t width, Activation activation, float* y);

// --- kv_cache.cpp, attention.cpp

struct PagedKV {  // one layer: [blocks, 2, block_size, kv_heads, head_dim], the last dimension dense
  DType dtype;
  void* data;
  int64_t block_size, kv_heads, head_dim;
  int64_t block_stride, value_offset, token_stride, head_stride;
};
void kv_write(Heads k, Heads v, const PagedKV& kv, const int64_t* slots);
// rope of q and k, then kv_write, token by token.
void rope_kv_write(Heads q, Heads k, Heads v, const float* cos, const float* sin, int64_t half, const PagedKV& kv,
                   const int64_t* slots);

struct Sequences {  // see PagedBatch in mlserve.kernels
  int64_t count;
  const int32_t *query_starts, *context_lens, *block_table, *block_starts;
  const int32_t* visible_ends;  // null if no query sees beyond itself
};
struct AttentionOptions {
  float scale;
  int64_t window = std::numeric_limits<int64_t>::max();
  float soft_cap = 0;  // used if has_soft_cap
  bool has_soft_cap = false;
};
void paged_attention(Heads q, const PagedKV& kv, const Sequences& sequences, const AttentionOptions& options,
                     float* out);

}  // namespace mlserve
