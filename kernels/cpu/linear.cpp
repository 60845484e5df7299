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

namespace mlserve {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunkBytes = std::size_t{64} << 20;

// Rows of x that one task keeps in its L2 cache, and the depth of a panel that it multiplies them by at a time. From 48
// to 192 rows and from 300 to 576 deep the speed differs by less than its noise.
constexpr int64_t kMaxTaskRows = 192;
constexpr int64_t kMaxDepth = 576;
// Few rows: weights a task streams before it asks for more work.
constexpr int64_t kTaskBytes = 128 << 10;

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
// Part `index` of `count` near-equal parts of [0, total).
Range part(int64_t total, int64_t count, int64_t index) {
  return {total * index / count, total * (index + 1) / count};
}

template <class T>
class LinearTask {
 public:
  LinearTask(ConstRows x, const PackedLinear& w, float* y)
      : x_(x), y_(y), out_(w.out_features), in_(w.in_features), panels_(static_cast<const T*>(w.panels.get())),
        bias_(static_cast<const float*>(w.bias.get())) {}

  // y[rows, columns of the panels] = bias + x[rows] @ panels
  void multiply(Range rows, Range panels) const {
    const int64_t tiles = divide_up(rows.size(), kTileRows);
    const int64_t depth_parts = tiles == 1 ? 1 : divide_up(in_, kMaxDepth);
    for (int64_t d = 0; d < depth_parts; ++d) {
      const Range depth = part(in_, depth_parts, d);
      for (int64_t p = panels.begin; p < panels.end; ++p) {
        for (int64_t t = 0; t < tiles; ++t) {
          const Range tile = part(rows.size(), tiles, t);
          multiply_tile_of(p, {rows.begin + tile.begin, rows.begin + tile.end}, depth,
                           prefetch_share(p, depth, tiles, t));
        }
      }
    }
  }

 private:
  const T* weights(int64_t panel, int64_t k) const { return panels_ + (panel * in_ + k) * kPanelColumns; }

  // While few rows meet a panel, the next one comes in from memory: each tile fetches its share, so that arithmetic
  // and memory overlap. A single tile is bound by memory alone, where the hardware's own prefetcher does best.
  Prefetch prefetch_share(int64_t panel, Range depth, int64_t tiles, int64_t tile) const {
    if (tiles == 1) return {reinterpret_cast<const char*>(weights(panel, 0)), 0};
    const int64_t stride = kPanelColumns * static_cast<int64_t>(sizeof(T)) / tiles;
    const char* next = reinterpret_cast<const char*>(weights(panel + 1, depth.begin));
    return {next + tile * stride * depth.size(), stride};
  }

  void multiply_tile_of(int64_t panel, Range rows, Range depth, Prefetch prefetch) const {
    const int64_t column = panel * kPanelColumns;
    float* y = y_ + rows.begin * out_ + column;
    float edge[kTileRows * kPanelColumns];  // stands in for y where the last panel is wider than y
    const int64_t columns = std::min<int64_t>(kPanelColumns, out_ - column);
    const bool whole = columns == kPanelColumns;
    if (!whole) std::memset(edge, 0, sizeof(edge));
    TileArgs<T> args{.x = x_.data + rows.begin * x_.stride + depth.begin,
                     .x_stride = x_.stride,
                     .panel = weights(panel, depth.begin),
                     .depth = depth.size(),
                     .start = bias_ ? bias_ + column : kZeroColumns,
                     .start_stride = 0,
                     .y = whole ? y : edge,
                     .y_stride = whole ? out_ : kPanelColumns,
                     .prefetch = prefetch};
    if (depth.begin > 0) {
      if (!whole) copy_columns(y, out_, edge, kPanelColumns, rows.size(), columns);
      args.start = args.y;
      args.start_stride = args.y_stride;
    }
    multiply_tile(rows.size(), args);
    if (!whole) copy_columns(edge, kPanelColumns, y, out_, rows.size(), columns);
  }

  static void copy_columns(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
                           int64_t columns) {
    for (int64_t m = 0; m < rows; ++m) std::memcpy(to + m * to_stride, from + m * from_stride, columns * sizeof(float));
  }

  ConstRows x_;
  float* y_;
  int64_t out_, in_;
  const T* panels_;
  const float* bias_;
};

template <class T>
void pack_panel(const T* weight, int64_t rows, int64_t in, T* panel) {
  for (int j = 0; j < kPanelColumns; ++j) {
    T* slot = panel + column_slot<T>(j);
    for (int64_t k = 0; k < in; ++k) slot[k * kPanelColumns] = j < rows ? weight[j * in + k] : T{};
  }
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
  const int64_t panels = divide_up(w.out_features, kPanelColumns);
  const int64_t row_parts = divide_up(x.rows, kMaxTaskRows);
  const int64_t bytes = panels * kPanelColumns * w.in_features * item_size(w.dtype);
  // many rows: enough tasks to balance the threads, few enough to use each block of x often
  const int64_t panel_parts = std::clamp<int64_t>(row_parts > 1 ? 8 : bytes / kTaskBytes, 1, std::min<int64_t>(panels, 256));
  with_type(w.dtype, [&](auto type) {
    const LinearTask<decltype(type)> task(x, w, y);
    parallel_for(row_parts * panel_parts, x.rows * bytes > (64 << 10), [&](int64_t i) {
      task.multiply(part(x.rows, row_parts, i / panel_parts), part(panels, panel_parts, i % panel_parts));
    });
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
