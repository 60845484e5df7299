// Linear layers on weights packed in panels: one layout and one kernel from a single row to a long prefill.
//
// There is no number of rows from which torch's linear would be the better choice: this one is 2.3 times as fast at 1
// row, 2.9 times at 16, 1.1 times at 256, and equal at 1,024 (tests/bench/LOG.md, also for prepacked oneDNN and MKL).
#include <sys/mman.h>

#include <cstring>
#include <new>

#include "kernels.h"
#include "panels.h"
#include "parallel.h"
#include "scratch.h"

namespace mlserve {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunkBytes = std::size_t{64} << 20;

// Tiles of rows that one task keeps in its L2 cache while it goes through panels.
constexpr int64_t kTaskTiles = 36 / kTileRows;
// Up to so many rows are packed once for all tasks; beyond that each task packs its own, and the memory stays bounded.
constexpr int64_t kSharedRows = 288;
constexpr int64_t kPackSerially = 16 << 10;  // numbers that one thread has packed before a second is woken
// Weights that a task goes through before it asks for more work. At its end it has fetched a panel that another thread
// may need, so many small tasks waste memory bandwidth.
constexpr int64_t kTaskBytes = 320 << 10;
// Beyond kSharedRows: parts of the panels.
constexpr int64_t kPanelParts = 2;

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
// Part `index` of `count` near-equal parts of [0, total).
Range part(int64_t total, int64_t count, int64_t index) {
  return {total * index / count, total * (index + 1) / count};
}

// packed[k, row] = x[row, k]
void pack_rows(ConstRows x, int64_t depth, float* packed) {
  int64_t m = 0;
  for (; m + 4 <= x.rows; m += 4) {
    const float* row = x.data + m * x.stride;
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
      __m128 a = _mm_loadu_ps(row + k), b = _mm_loadu_ps(row + x.stride + k);
      __m128 c = _mm_loadu_ps(row + 2 * x.stride + k), d = _mm_loadu_ps(row + 3 * x.stride + k);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      float* to = packed + k * x.rows + m;
      _mm_storeu_ps(to, a);
      _mm_storeu_ps(to + x.rows, b);
      _mm_storeu_ps(to + 2 * x.rows, c);
      _mm_storeu_ps(to + 3 * x.rows, d);
    }
    for (; k < depth; ++k) {
      for (int i = 0; i < 4; ++i) packed[k * x.rows + m + i] = row[i * x.stride + k];
    }
  }
  for (; m < x.rows; ++m) {
    for (int64_t k = 0; k < depth; ++k) packed[k * x.rows + m] = x.data[m * x.stride + k];
  }
}

template <class T>
class LinearTask {
 public:
  LinearTask(ConstRows x, const PackedLinear& w, float* y)
      : x_(x), y_(y), out_(w.out_features), in_(w.in_features), panels_(static_cast<const T*>(w.panels.get())),
        bias_(static_cast<const float*>(w.bias.get())), tiles_(divide_up(x.rows, kTileRows)) {}

  // The rows of x are cut into near-equal tiles.
  int64_t tiles() const { return tiles_; }
  Range rows_of(int64_t tile) const { return part(x_.rows, tiles_, tile); }

  // Writes a tile depth-major: packed[k, row] = x[row, k]
  void pack(int64_t tile, float* packed) const {
    const Range rows = rows_of(tile);
    pack_rows({x_.data + rows.begin * x_.stride, rows.size(), x_.stride}, in_, packed);
  }

  // y = bias + x @ panels for some tiles, packed one after the other
  void multiply_packed(Range tiles, const float* packed, Range panels) const {
    const int64_t first_row = rows_of(tiles.begin).begin;
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      for (int64_t t = tiles.begin; t < tiles.end; ++t) {
        const Range rows = rows_of(t);
        multiply_tile_of<RowLayout::kPacked>(p, rows, packed + (rows.begin - first_row) * in_,
                                             next_panel_share(p, tiles.size(), t - tiles.begin));
      }
    }
  }

  // The same for a single tile, all rows of x as they lie. It is bound by memory alone, where the hardware's own
  // prefetcher does best.
  void multiply_one_tile(Range panels) const {
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      multiply_tile_of<RowLayout::kRows>(p, {0, x_.rows}, x_.data, {reinterpret_cast<const char*>(weights(p)), 0});
    }
  }

 private:
  const T* weights(int64_t panel) const { return panels_ + panel * in_ * kPanelColumns; }

  // While rows meet a panel, the next one comes in from memory: each tile fetches its share, so that arithmetic and
  // memory overlap.
  Prefetch next_panel_share(int64_t panel, int64_t tiles, int64_t tile) const {
    constexpr int64_t bytes = kUnroll<RowLayout::kPacked> * kPanelColumns * sizeof(T);
    const int64_t stride = bytes / tiles, fetches = in_ / kUnroll<RowLayout::kPacked>;
    return {reinterpret_cast<const char*>(weights(panel + 1)) + tile * stride * fetches, stride};
  }

  template <RowLayout layout>
  void multiply_tile_of(int64_t panel, Range rows, const float* x, Prefetch prefetch) const {
    const int64_t column = panel * kPanelColumns;
    float* y = y_ + rows.begin * out_ + column;
    const int64_t columns = std::min<int64_t>(kPanelColumns, out_ - column);
    const bool whole = columns == kPanelColumns;
    float edge[kTileRows * kPanelColumns];  // stands in for y where the last panel is wider than y
    multiply_tile<layout>(rows.size(), TileArgs<T>{.x = x,
                                                   .x_stride = x_.stride,
                                                   .panel = weights(panel),
                                                   .depth = in_,
                                                   .start = bias_ ? bias_ + column : kZeroColumns,
                                                   .start_stride = 0,
                                                   .y = whole ? y : edge,
                                                   .y_stride = whole ? out_ : kPanelColumns,
                                                   .prefetch = prefetch});
    if (!whole) copy_columns(edge, y, rows.size(), columns);
  }

  void copy_columns(const float* edge, float* y, int64_t rows, int64_t columns) const {
    for (int64_t m = 0; m < rows; ++m) std::memcpy(y + m * out_, edge + m * kPanelColumns, columns * sizeof(float));
  }

  ConstRows x_;
  float* y_;
  int64_t out_, in_;
  const T* panels_;
  const float* bias_;
  int64_t tiles_;
};

template <class T>
void pack_panel(const T* weight, int64_t rows, int64_t in, T* panel) {
  for (int j = 0; j < kPanelColumns; ++j) {
    T* slot = panel + column_slot<T>(j);
    for (int64_t k = 0; k < in; ++k) slot[k * kPanelColumns] = j < rows ? weight[j * in + k] : T{};
  }
}

// Tasks of about kTaskBytes, as many for one thread as for another.
int64_t rounds_of_tasks(int64_t bytes) {
  const int64_t round = max_threads() * kTaskBytes;
  return max_threads() * std::max<int64_t>((bytes + round / 2) / round, 1);
}

}  // namespace

std::shared_ptr<void> WeightArena::allocate(std::size_t bytes) {
  constexpr std::size_t line = 64;
  bytes = (bytes + line - 1) / line * line;
  if (used_ + bytes > size_) {
    size_ = (std::max(bytes, kChunkBytes) + kHugePage - 1) / kHugePage * kHugePage;
    used_ = 0;
    char* memory = static_cast<char*>(std::aligned_alloc(kHugePage, size_));
    if (!memory) throw std::bad_alloc();
    madvise(memory, size_, MADV_HUGEPAGE);  // a hint: without it everything works, slower
    chunk_ = std::shared_ptr<char>(memory, [](char* p) { std::free(p); });
  }
  std::shared_ptr<void> piece(chunk_, chunk_.get() + used_);
  used_ += bytes;
  return piece;
}

PackedLinear pack_linear(WeightArena& arena, DType dtype, const void* weight, int64_t out, int64_t in,
                         const float* bias) {
  const int64_t panels = divide_up(out, kPanelColumns);
  PackedLinear packed{dtype, out, in, arena.allocate(panels * kPanelColumns * in * item_size(dtype)), nullptr};
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(panels, true, [&](int64_t p) {
      const int64_t row = p * kPanelColumns;
      pack_panel(static_cast<const T*>(weight) + row * in, out - row, in,
                 static_cast<T*>(packed.panels.get()) + row * in);
    });
  });
  if (bias) {
    packed.bias = arena.allocate(panels * kPanelColumns * sizeof(float));
    float* padded = static_cast<float*>(packed.bias.get());
    for (int64_t n = 0; n < panels * kPanelColumns; ++n) padded[n] = n < out ? bias[n] : 0;
  }
  return packed;
}

void linear(ConstRows x, const PackedLinear& w, float* y) {
  const int64_t panels = divide_up(w.out_features, kPanelColumns), in = w.in_features;
  const int64_t bytes = panels * kPanelColumns * in * item_size(w.dtype);
  const int64_t panel_parts = std::min(rounds_of_tasks(bytes), panels);
  with_type(w.dtype, [&](auto type) {
    const LinearTask<decltype(type)> task(x, w, y);
    const int64_t tiles = task.tiles(), row_parts = divide_up(tiles, kTaskTiles);
    if (tiles == 1) {
      parallel_for(panel_parts, x.rows * bytes > (64 << 10),
                   [&](int64_t i) { task.multiply_one_tile(part(panels, panel_parts, i)); });
    } else if (x.rows <= kSharedRows) {
      float* packed = thread_scratch(x.rows * in);
      parallel_for(tiles, x.rows * in > kPackSerially,
                   [&](int64_t t) { task.pack(t, packed + task.rows_of(t).begin * in); });
      parallel_for(row_parts * panel_parts, true, [&](int64_t i) {
        const Range part_tiles = part(tiles, row_parts, i % row_parts);
        task.multiply_packed(part_tiles, packed + task.rows_of(part_tiles.begin).begin * in,
                             part(panels, panel_parts, i / row_parts));
      });
    } else {
      parallel_for(row_parts * kPanelParts, true, [&](int64_t i) {
        const Range part_tiles = part(tiles, row_parts, i / kPanelParts);
        float* packed = thread_scratch(kTaskTiles * kTileRows * in);
        float* end = packed;
        for (int64_t t = part_tiles.begin; t < part_tiles.end; ++t) {
          task.pack(t, end);
          end += task.rows_of(t).size() * in;
        }
        task.multiply_packed(part_tiles, packed, part(panels, kPanelParts, i % kPanelParts));
      });
    }
  });
}

void embedding(const int64_t* ids, int64_t count, const PackedLinear& table, float* y) {
  const int64_t in = table.in_features;
  with_type(table.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(count, count * in > (8 << 10), [&](int64_t t) {
      const int64_t panel = ids[t] / kPanelColumns;
      const int column = static_cast<int>(ids[t] % kPanelColumns);
      const T* row = static_cast<const T*>(table.panels.get()) + panel * kPanelColumns * in + column_slot<T>(column);
      for (int64_t k = 0; k < in; ++k) y[t * in + k] = to_float(row[k * kPanelColumns]);
    });
  });
}

}  // namespace mlserve
