// The rotary embedding of one token.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace mlserve {

// All heads of token t in place: (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + half).
inline void rotate_token(const Heads& x, int64_t t, const float* cos, const float* sin, int64_t half) {
  for (int64_t h = 0; h < x.heads; ++h) {
    float* a = x.data + t * x.token_stride + h * x.head_stride;
    float* b = a + half;
    for (int64_t i = 0; i < half; i += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, half - i);
      const bool whole = n == kLanes;
      const auto get = [&](const float* p) { return whole ? load(p) : load_partial(p, n); };
      const Vec c = get(cos + t * half + i), s = get(sin + t * half + i), u = get(a + i), v = get(b + i);
      const Vec rotated_a = _mm256_fmsub_ps(u, c, _mm256_mul_ps(v, s));
      const Vec rotated_b = fma(v, c, _mm256_mul_ps(u, s));
      if (whole) {
        store(a + i, rotated_a);
        store(b + i, rotated_b);
      } else {
        store_partial(a + i, rotated_a, n);
        store_partial(b + i, rotated_b, n);
      }
    }
  }
}

}  // namespace mlserve
