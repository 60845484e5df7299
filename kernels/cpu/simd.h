// Eight float32 lanes (AVX2, FMA, F16C): loads and stores of every storage type, exp and tanh.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace mlserve {

using Vec = __m256;
constexpr int kLanes = 8;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec splat(float value) { return _mm256_set1_ps(value); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
// Rounds to nearest, ties to even; NaN stays NaN (adding the rounding bias could carry it over to a number).
inline void store(BFloat16* p, Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store(Float16* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(value.bits << 16))); }
inline float to_float(Float16 value) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(value.bits))); }

// The first `count` < 8 lanes; nothing beyond them is touched.
template <class T>
inline Vec load_partial(const T* p, int64_t count) {
  T lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline void store_partial(float* p, Vec v, int64_t count) {
  float lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

inline float sum(Vec v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float max(Vec v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// The four sums of four vectors: lane i holds sum(v_i).
inline __m128 sum4(Vec a, Vec b, Vec c, Vec d) {
  const Vec abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

// x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) - 1 = r + r^2 P(r), with P fitted (minimax, relative error of exp 3e-9).
struct ReducedExp {
  Vec power;  // 2^n
  Vec expm1;  // exp(r) - 1
};
inline ReducedExp reduce_exp(Vec x) {
  const Vec n = _mm256_round_ps(_mm256_mul_ps(x, splat(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vec r = _mm256_fnmadd_ps(n, splat(0.693359375f), x);  // ln 2 in two parts: n times the first is exact
  r = _mm256_fnmadd_ps(n, splat(-2.12194440e-4f), r);
  Vec p = splat(1.3814537e-3f);
  p = fma(p, r, splat(8.3687808e-3f));
  p = fma(p, r, splat(4.1668393e-2f));
  p = fma(p, r, splat(1.6666520e-1f));
  p = fma(p, r, splat(4.9999994e-1f));
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)), fma(_mm256_mul_ps(r, r), p, r)};
}

// Relative error 2e-7. Below -87.3 (subnormal results) it is 0; above 88.3 it stays at exp(88.3); NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec lowest = splat(-87.3f);
  // min and max return their second operand if either is NaN: x must stand there
  const Vec clamped = _mm256_max_ps(lowest, _mm256_min_ps(splat(88.3f), x));
  const ReducedExp e = reduce_exp(clamped);
  return _mm256_andnot_ps(_mm256_cmp_ps(x, lowest, _CMP_LT_OQ), fma(e.power, e.expm1, e.power));
}

// tanh(x) = t / (t + 2) with t = exp(2x) - 1, which has no cancellation near 0. Relative error 3e-7.
inline Vec tanh(Vec x) {
  const Vec clamped = _mm256_max_ps(splat(-9.5f), _mm256_min_ps(splat(9.5f), x));  // beyond: +-1 in float32
  const ReducedExp e = reduce_exp(_mm256_add_ps(clamped, clamped));
  const Vec t = fma(e.power, e.expm1, _mm256_sub_ps(e.power, splat(1.0f)));
  return _mm256_div_ps(t, _mm256_add_ps(t, splat(2.0f)));
}

inline Vec sigmoid(Vec x) {
  const Vec one = splat(1.0f);
  return _mm256_div_ps(one, _mm256_add_ps(one, exp(_mm256_sub_ps(zero(), x))));
}

}  // namespace mlserve
