// Storing keys and values in the paged cache, converted to its storage type.
#include "kernels.h"
#include "parallel.h"
#include "rotation.h"

namespace mlserve {
namespace {

template <class T>
void store_heads(Heads x, int64_t token, int64_t head_dim, T* to, int64_t head_stride) {
  for (int64_t h = 0; h < x.heads; ++h) {
    const float* from = x.data + token * x.token_stride + h * x.head_stride;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(to + h * head_stride + d, load(from + d));
  }
}

constexpr int64_t kTokens = 16;        // of one task
constexpr int64_t kSerialTokens = 64;  // below which one thread is sooner done than two are woken

// Stores the tokens' keys and values; prepare(token) comes before.
template <class Prepare>
void store_tokens(Heads k, Heads v, const PagedKV& kv, const int64_t* slots, const Prepare& prepare) {
  with_type(kv.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(divide_up(k.tokens, kTokens), k.tokens >= kSerialTokens, [&](int64_t task) {
      for (int64_t t = task * kTokens; t < std::min(k.tokens, (task + 1) * kTokens); ++t) {
        prepare(t);
        T* row = static_cast<T*>(kv.data) + slots[t] / kv.block_size * kv.block_stride +
                 slots[t] % kv.block_size * kv.token_stride;
        store_heads(k, t, kv.head_dim, row, kv.head_stride);
        store_heads(v, t, kv.head_dim, row + kv.value_offset, kv.head_stride);
      }
    });
  });
}

}  // namespace

void kv_write(Heads k, Heads v, const PagedKV& kv, const int64_t* slots) {
  store_tokens(k, v, kv, slots, [](int64_t) {});
}

void rope_kv_write(Heads q, Heads k, Heads v, const float* cos, const float* sin, int64_t half, const PagedKV& kv,
                   const int64_t* slots) {
  store_tokens(k, v, kv, slots, [&](int64_t t) {
    rotate_token(q, t, cos, sin, half);
    rotate_token(k, t, cos, sin, half);
  });
}

}  // namespace mlserve
