// Element-wise maps of two rows, and the gates of gated activations.
#pragma once

#include "kernels.h"

namespace mlserve {

// y[i] = f(a[i], b[i])
template <class A, class B, class F>
inline void map2(const A* a, const B* b, float* y, int64_t width, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(y + i, f(load(a + i), load(b + i)));
  if (i < width) {
    store_partial(y + i, f(load_partial(a + i, width - i), load_partial(b + i, width - i)), width - i);
  }
}

inline Vec silu(Vec x) { return _mm256_mul_ps(x, sigmoid(x)); }

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Vec gelu_tanh(Vec x) {
  const Vec cubic = fma(_mm256_mul_ps(x, x), splat(0.044715f), splat(1.0f));
  const Vec u2 = _mm256_mul_ps(_mm256_mul_ps(x, cubic), splat(1.5957691216f));
  return _mm256_mul_ps(x, sigmoid(u2));
}

// y = activation(gate) * up
inline void gate_row(Activation activation, const float* gate, const float* up, float* y, int64_t width) {
  if (activation == Activation::kSilu) {
    map2(gate, up, y, width, [](Vec g, Vec u) { return _mm256_mul_ps(silu(g), u); });
  } else {
    map2(gate, up, y, width, [](Vec g, Vec u) { return _mm256_mul_ps(gelu_tanh(g), u); });
  }
}

}  // namespace mlserve
