// The 16 columns of a panel (see panels.h) in registers: one of AVX-512's, or two of AVX2's. The compiler's flags choose.
#pragma once

#include "simd.h"

namespace mlserve {

constexpr int kPanelColumns = 16;

// Where column j of a panel stands among its 16 numbers.
template <class T>
constexpr int column_slot(int j) {
  return j;
}

#if defined(__AVX512F__)

// Rows of a tile: 12 accumulators hide the latency of two FMA units, and each FMA takes its number of x from memory.
constexpr int kTileRows = 12;

using Columns = __m512;

inline Columns load_columns(const float* p) { return _mm512_loadu_ps(p); }
inline Columns load_columns(const BFloat16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Columns load_columns(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_columns(float* p, Columns v) { _mm512_storeu_ps(p, v); }

// sum + x * columns
inline Columns add_product(float x, Columns columns, Columns sum) {
  return _mm512_fmadd_ps(_mm512_set1_ps(x), columns, sum);
}

#else

// Rows of a tile: 12 accumulators of the 16 registers, and 8 loads for 12 FMAs.
constexpr int kTileRows = 6;

struct Columns {
  Vec low, high;
};

template <class T>
inline Columns load_columns(const T* p) {
  return {load(p), load(p + kLanes)};
}
inline Columns load_columns(const BFloat16* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))))};
}
inline void store_columns(float* p, Columns v) {
  store(p, v.low);
  store(p + kLanes, v.high);
}

// sum + x * columns
inline Columns add_product(float x, Columns columns, Columns sum) {
  const Vec value = splat(x);
  return {fma(value, columns.low, sum.low), fma(value, columns.high, sum.high)};
}

// bf16 columns j and j + 8 share 32 bits, so that a shift and a mask widen 16 of them.
template <>
constexpr int column_slot<BFloat16>(int j) {
  return j < kLanes ? 2 * j : 2 * (j - kLanes) + 1;
}

#endif

}  // namespace mlserve
