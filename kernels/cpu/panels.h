// The one inner product of all matrix work: float32 rows times a panel of 16 columns.
//
// A panel holds 16 columns of a matrix, depth-major: for each k, 16 numbers in one or two cache lines. Weights are laid
// out so once, when a model is loaded; attention lays out tiles of keys and values so. A tile of a few rows x 16 columns
// keeps its sums in registers and runs at the FMA units' limit (BLIS, Van Zee and van de Geijn 2015).
//
// Every element is summed over k in order in one accumulator, whatever the number of rows: a row's result has the same
// bits alone and in any batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "columns.h"

namespace mlserve {

alignas(64) inline constexpr float kZeroColumns[kPanelColumns] = {};

// Memory to fetch while a tile is computed: a line each time, `stride` bytes apart.
struct Prefetch {
  const char* at;
  int64_t stride;
};

// How a tile's rows lie: as rows, or depth-major like a panel, [depth][rows], so that they are one stream to read.
enum class RowLayout { kRows, kPacked };

// Steps along the depth for one line to fetch, and for one test of the loop's end.
template <RowLayout layout>
constexpr int kUnroll = layout == RowLayout::kPacked ? 2 : 1;

template <class T>
struct TileArgs {
  const float* x;    // [rows, depth], or packed
  int64_t x_stride;  // from row to row; not used if they are packed
  const T* panel;    // [depth, 16]
  int64_t depth;
  const float* start;  // [rows, 16]: what the sums start from (a bias with stride 0, or y itself)
  int64_t start_stride;
  float* y;  // [rows, 16]
  int64_t y_stride;
  Prefetch prefetch;
};

template <int kRows, RowLayout layout, class T>
inline void multiply_rows(const TileArgs<T>& t) {
  constexpr bool packed = layout == RowLayout::kPacked;
  Columns sums[kRows];
#pragma GCC unroll 12
  for (int m = 0; m < kRows; ++m) sums[m] = load_columns(t.start + m * t.start_stride);
  const float* x = t.x;
  const T* panel = t.panel;
  const char* ahead = t.prefetch.at;
  const auto step = [&](int u) __attribute__((always_inline)) {
    asm("" : "+r"(panel), "+r"(x));  // or GCC loads for the steps to come until it has to spill sums
    const Columns columns = load_columns(panel + u * kPanelColumns);
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
      sums[m] = add_product(packed ? x[u * kRows + m] : x[m * t.x_stride + u], columns, sums[m]);
    }
  };
  const auto advance = [&](int steps) __attribute__((always_inline)) {
    panel += steps * kPanelColumns;
    x += packed ? steps * kRows : steps;
  };
  int64_t k = 0;
  for (; k + kUnroll<layout> <= t.depth; k += kUnroll<layout>) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll<layout>; ++u) step(u);
    _mm_prefetch(ahead, _MM_HINT_T0);
    ahead += t.prefetch.stride;
    advance(kUnroll<layout>);
  }
  for (; k < t.depth; ++k) {
    step(0);
    advance(1);
  }
#pragma GCC unroll 12
  for (int m = 0; m < kRows; ++m) store_columns(t.y + m * t.y_stride, sums[m]);
}

// y = start + x @ panel for 1 to kTileRows rows.
template <RowLayout layout, class T>
inline void multiply_tile(int64_t rows, const TileArgs<T>& t) {
  [&]<int... kFewer>(std::integer_sequence<int, kFewer...>) {
    ((rows == kFewer + 1 && (multiply_rows<kFewer + 1, layout>(t), true)) || ...);
  }(std::make_integer_sequence<int, kTileRows>{});
}

}  // namespace mlserve
