// Norms, rotary embedding and gated activations: one pass over float32 rows.
#include <cmath>

#include "gating.h"
#include "kernels.h"
#include "parallel.h"
#include "rotation.h"

namespace mlserve {
namespace {

// Numbers below which one thread is sooner done than two are woken.
constexpr int64_t kSerialWork = 16 << 10;
// Rows of one task, so that a task is worth handing out.
int64_t rows_per_task(int64_t width) { return std::max<int64_t>(1, (4 << 10) / std::max<int64_t>(width, 1)); }

template <class Row>
void for_rows(int64_t rows, int64_t width, const Row& row) {
  const int64_t step = rows_per_task(width);
  parallel_for((rows + step - 1) / step, rows * width > kSerialWork, [&](int64_t task) {
    for (int64_t r = task * step; r < std::min(rows, (task + 1) * step); ++r) row(r);
  });
}

float mean_of_squares(const float* x, int64_t width) {
  Vec even = zero(), odd = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    const Vec a = load(x + i), b = load(x + i + kLanes);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  for (; i < width; i += kLanes) {
    const Vec a = i + kLanes <= width ? load(x + i) : load_partial(x + i, width - i);
    even = fma(a, a, even);
  }
  return sum(_mm256_add_ps(even, odd)) / static_cast<float>(width);
}

template <class T>
void normalise(const float* x, int64_t width, const T* weight, float eps, float* y) {
  const Vec scale = splat(1.0f / std::sqrt(mean_of_squares(x, width) + eps));
  map2(x, weight, y, width, [&](Vec a, Vec w) { return _mm256_mul_ps(_mm256_mul_ps(a, scale), w); });
}

}  // namespace

void rms_norm(ConstRows x, int64_t width, DType dtype, const void* weight, float eps, float* y) {
  with_type(dtype, [&](auto type) {
    const auto* w = static_cast<const decltype(type)*>(weight);
    for_rows(x.rows, width, [&](int64_t r) { normalise(x.data + r * x.stride, width, w, eps, y + r * width); });
  });
}

void add_rms_norm(ConstRows x, float* residual, int64_t width, DType dtype, const void* weight, float eps, float* y) {
  with_type(dtype, [&](auto type) {
    const auto* w = static_cast<const decltype(type)*>(weight);
    for_rows(x.rows, width, [&](int64_t r) {
      float* sum_row = residual + r * width;
      map2(x.data + r * x.stride, sum_row, sum_row, width, [](Vec a, Vec b) { return _mm256_add_ps(a, b); });
      normalise(sum_row, width, w, eps, y + r * width);
    });
  });
}

void rope(Heads x, const float* cos, const float* sin, int64_t half) {
  for_rows(x.tokens, x.heads * half, [&](int64_t t) { rotate_token(x, t, cos, sin, half); });
}

void gated(ConstRows gate_up, int64_t width, Activation activation, float* y) {
  for_rows(gate_up.rows, width, [&](int64_t r) {
    const float* gate = gate_up.data + r * gate_up.stride;
    gate_row(activation, gate, gate + width, y + r * width, width);
  });
}

}  // namespace mlserve
