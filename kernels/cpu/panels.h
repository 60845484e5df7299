// The one inner product of all matrix work: float32 rows times a panel of 16 columns.
//
// A panel holds 16 columns of a matrix, depth-major: for each k, 16 numbers in one or two cache lines. Weights are laid
// out so once, when a model is loaded; attention lays out tiles of keys and values so. The tile of 6 rows x 16 columns
// keeps 12 accumulators in registers and needs 8 loads for 12 FMAs, so it runs at the FMA units' limit.
//
// Every element is summed over k in order in one accumulator, whatever the number of rows: a row's result has the same
// bits alone and in any batch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace mlserve {

constexpr int kPanelColumns = 16;
constexpr int kTileRows = 6;
alignas(64) inline constexpr float kZeroColumns[kPanelColumns] = {};

// Where column j of a panel stands among its 16 numbers. bf16 columns j and j + 8 share 32 bits, so that a shift and a
// mask widen 16 of them.
template <class T>
constexpr int column_slot(int j) {
  return j;
}
template <>
constexpr int column_slot<BFloat16>(int j) {
  return j < kLanes ? 2 * j : 2 * (j - kLanes) + 1;
}

inline void load_columns(const float* p, Vec& low, Vec& high) {
  low = load(p);
  high = load(p + kLanes);
}
inline void load_columns(const BFloat16* p, Vec& low, Vec& high) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  high = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline void load_columns(const Float16* p, Vec& low, Vec& high) {
  low = load(p);
  high = load(p + kLanes);
}

// Memory to fetch while a tile is computed: one line each step, `stride` bytes apart.
struct Prefetch {
  const char* at;
  int64_t stride;
};

template <class T>
struct TileArgs {
  const float* x;  // [rows, depth]
  int64_t x_stride;
  const T* panel;  // [depth, 16]
  int64_t depth;
  const float* start;  // [rows, 16]: what the sums start from (a bias with stride 0, or y itself)
  int64_t start_stride;
  float* y;  // [rows, 16]
  int64_t y_stride;
  Prefetch prefetch;
};

template <int kRows, class T>
inline void multiply_rows(const TileArgs<T>& t) {
  Vec sums[kRows][2];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    sums[m][0] = load(t.start + m * t.start_stride);
    sums[m][1] = load(t.start + m * t.start_stride + kLanes);
  }
  const float* x = t.x;
  const T* panel = t.panel;
  const char* ahead = t.prefetch.at;
  for (int64_t k = 0; k < t.depth; ++k) {
    Vec low, high;
    load_columns(panel, low, high);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Vec value = _mm256_broadcast_ss(x + m * t.x_stride);
      sums[m][0] = fma(value, low, sums[m][0]);
      sums[m][1] = fma(value, high, sums[m][1]);
    }
    _mm_prefetch(ahead, _MM_HINT_T0);
    ahead += t.prefetch.stride;
    panel += kPanelColumns;
    ++x;
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    store(t.y + m * t.y_stride, sums[m][0]);
    store(t.y + m * t.y_stride + kLanes, sums[m][1]);
  }
}

// y = start + x @ panel for 1 to 6 rows.
template <class T>
inline void multiply_tile(int64_t rows, const TileArgs<T>& t) {
  switch (rows) {
    case 1: return multiply_rows<1>(t);
    case 2: return multiply_rows<2>(t);
    case 3: return multiply_rows<3>(t);
    case 4: return multiply_rows<4>(t);
    case 5: return multiply_rows<5>(t);
    default: return multiply_rows<6>(t);
  }
}

}  // namespace mlserve
