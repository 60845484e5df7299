// The few AVX-512 operations that columns.h uses, on pairs of AVX2 registers: with this header included first, a machine
// without AVX-512 runs that code.
#pragma once

#include <immintrin.h>

#define __AVX512F__ 1

struct EmulatedFloats {
  __m256 low, high;
};
struct EmulatedInts {
  __m256i low, high;
};

inline EmulatedFloats emulated_loadu_ps(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void emulated_storeu_ps(float* p, EmulatedFloats v) {
  _mm256_storeu_ps(p, v.low);
  _mm256_storeu_ps(p + 8, v.high);
}
inline EmulatedFloats emulated_set1_ps(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline EmulatedFloats emulated_fmadd_ps(EmulatedFloats a, EmulatedFloats b, EmulatedFloats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline EmulatedInts emulated_cvtepu16_epi32(__m256i v) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1))};
}
inline EmulatedInts emulated_slli_epi32(EmulatedInts v, int count) {
  return {_mm256_slli_epi32(v.low, count), _mm256_slli_epi32(v.high, count)};
}
inline EmulatedFloats emulated_castsi512_ps(EmulatedInts v) {
  return {_mm256_castsi256_ps(v.low), _mm256_castsi256_ps(v.high)};
}
inline EmulatedFloats emulated_cvtph_ps(__m256i v) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
}

#define __m512 EmulatedFloats
#define __m512i EmulatedInts
#define _mm512_loadu_ps emulated_loadu_ps
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_slli_epi32 emulated_slli_epi32
#define _mm512_castsi512_ps emulated_castsi512_ps
#define _mm512_cvtph_ps emulated_cvtph_ps
