// Storing keys and values in the paged cache, converted to its storage type.
#include "kernels.h"
#include "parallel.h"

namespace mlserve {
namespace {

template <class T>
void store_heads(Heads x, int64_t token, int64_t head_dim, T* to, int64_t head_stride) {
  for (int64_t h = 0; h < x.heads; ++h) {
    const float* from = x.data + token * x.token_stride + h * x.head_stride;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(to + h * head_stride + d, load(from + d));
  }
}

}  // namespace

void kv_write(Heads k, Heads v, const PagedKV& kv, const int64_t* slots) {
  with_type(kv.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(divide_up(k.tokens, 16), k.tokens >= 64, [&](int64_t task) {
      for (int64_t t = task * 16; t < std::min(k.tokens, task * 16 + 16); ++t) {
        T* row = static_cast<T*>(kv.data) + slots[t] / kv.block_size * kv.block_stride +
                 slots[t] % kv.block_size * kv.token_stride;
        store_heads(k, t, kv.head_dim, row, kv.head_stride);
        store_heads(v, t, kv.head_dim, row + kv.value_offset, kv.head_stride);
      }
    });
  });
}

}  // namespace mlserve
