// Linear layers on weights packed in panels: one layout and one kernel from a single row to a long prefill.
//
// What follows a product - what adapters add to it, a gate's activation - is done by the task that made it, while the
// numbers are in its cache: nobody else waits for them, and what an activation takes is never written to memory.
//
// There is no number of rows from which torch's linear would be the better choice: this one is 2.3 times as fast at 1
// row, 2.9 times at 16, 1.1 times at 256, and equal at 1,024 (tests/bench/LOG.md, also for prepacked oneDNN and MKL).
#include <cstring>

#include "gating.h"
#include "kernels.h"
#include "panels.h"
#include "parallel.h"
#include "scratch.h"

namespace mlserve {
namespace {

// Tiles of rows that one task keeps in its L2 cache while it goes through panels.
constexpr int64_t kTaskTiles = 36 / kTileRows;
// Up to so many rows are packed once for all tasks; beyond that each task packs its own, and the memory stays bounded.
constexpr int64_t kSharedRows = 288;
constexpr int64_t kPackSerially = 16 << 10;  // numbers that one thread has packed before a second is woken
// Weights that a task goes through before it takes the next one of its thread's run.
constexpr int64_t kTaskBytes = 320 << 10;
// Beyond kSharedRows: as long as each thread has fewer tasks than this, each goes through half of the panels, so that
// threads end together. Rows are packed once more for it.
constexpr int64_t kManyTasks = 16;
// Panels of a gate, and as many of up, whose products a task keeps until they are put together.
constexpr int64_t kGatedPanels = 6;

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

// What is done with a product before it is y.
struct Epilogue {
  const LoraPair* lora;  // null if no adapter adds anything
  const float* shrunk;   // of the adapters' rows
  Activation activation;
};

template <class T>
class LinearTask {
 public:
  LinearTask(ConstRows x, const PackedLinear& w, const Epilogue& epilogue, float* y)
      : x_(x), epilogue_(epilogue), y_(y), out_(w.out_features), in_(w.in_features),
        panels_(static_cast<const T*>(w.panels.get())), bias_(static_cast<const float*>(w.bias.get())),
        tiles_(divide_up(x.rows, kTileRows)) {}

  // The rows of x are cut into near-equal tiles.
  int64_t tiles() const { return tiles_; }
  Range rows_of(Range tiles) const {
    return {part(x_.rows, tiles_, tiles.begin).begin, part(x_.rows, tiles_, tiles.end - 1).end};
  }

  // Columns are shared out in groups: panels, or with an activation pairs of a gate's panel and up's.
  int64_t groups() const { return is_gated() ? out_ / 2 / kPanelColumns : divide_up(out_, kPanelColumns); }

  // Writes a tile depth-major: packed[k, row] = x[row, k]
  void pack(int64_t tile, float* packed) const {
    const Range rows = rows_of({tile, tile + 1});
    pack_rows({x_.data + rows.begin * x_.stride, rows.size(), x_.stride}, in_, packed);
  }

  // y for some tiles, packed one after the other.
  void run_packed(Range tiles, const float* packed, Range groups) const {
    run(rows_of(tiles), groups, [&](Range panels, int64_t next, const Patch& y) {
      for (int64_t p = panels.begin; p < panels.end; ++p) {
        const int64_t following = p + 1 < panels.end ? p + 1 : next;
        for (int64_t t = tiles.begin; t < tiles.end; ++t) {
          const Range rows = rows_of({t, t + 1});
          multiply_tile_of<RowLayout::kPacked>(p, rows, packed + (rows.begin - y.rows.begin) * in_, y,
                                               share_of(following, tiles.size(), t - tiles.begin));
        }
      }
    });
  }

  // The same for a single tile, all rows of x as they lie. It is bound by memory alone, where the hardware's own
  // prefetcher does best.
  void run_one_tile(Range groups) const {
    run({0, x_.rows}, groups, [&](Range panels, int64_t, const Patch& y) {
      for (int64_t p = panels.begin; p < panels.end; ++p) {
        multiply_tile_of<RowLayout::kRows>(p, y.rows, x_.data, y, {reinterpret_cast<const char*>(weights(p)), 0});
      }
    });
  }

 private:
  bool is_gated() const { return epilogue_.activation != Activation::kNone; }
  const T* weights(int64_t panel) const { return panels_ + panel * in_ * kPanelColumns; }
  Range columns_of(Range panels) const {
    return {panels.begin * kPanelColumns, std::min(panels.end * kPanelColumns, out_)};
  }

  // y = epilogue(multiply(panels, the panel after them, where their columns go))
  template <class Multiply>
  void run(Range rows, Range groups, const Multiply& multiply) const {
    if (!is_gated()) {
      const Range columns = columns_of(groups);
      const Patch y{y_ + rows.begin * out_ + columns.begin, out_, rows, columns};
      multiply(groups, groups.end, y);
      add_adapters(y);
      return;
    }
    constexpr int64_t stride = 2 * kGatedPanels * kPanelColumns;
    alignas(64) float buffer[kTaskTiles * kTileRows * stride];
    const int64_t width = out_ / 2, parts = divide_up(groups.size(), kGatedPanels);
    for (int64_t i = 0; i < parts; ++i) {
      const Range within = part(groups.size(), parts, i);
      const Range gates{groups.begin + within.begin, groups.begin + within.end};
      const Range ups{gates.begin + this->groups(), gates.end + this->groups()};
      const Patch gate{buffer, stride, rows, columns_of(gates)};
      const Patch up{buffer + stride / 2, stride, rows, columns_of(ups)};
      multiply(gates, ups.begin, gate);
      multiply(ups, gates.end, up);
      add_adapters(gate);
      add_adapters(up);
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        gate_row(epilogue_.activation, gate.row(r), up.row(r), y_ + r * width + gate.columns.begin, gate.columns.size());
      }
    }
  }

  void add_adapters(const Patch& y) const {
    if (epilogue_.lora) lora_expand(epilogue_.shrunk, epilogue_.lora->b, epilogue_.lora->rows, y);
  }

  // While rows meet a panel, the one after it comes in from memory: each tile fetches its share, so that arithmetic and
  // memory overlap.
  Prefetch share_of(int64_t panel, int64_t tiles, int64_t tile) const {
    constexpr int64_t bytes = kUnroll<RowLayout::kPacked> * kPanelColumns * sizeof(T);
    const int64_t stride = bytes / tiles, fetches = in_ / kUnroll<RowLayout::kPacked>;
    return {reinterpret_cast<const char*>(weights(panel)) + tile * stride * fetches, stride};
  }

  template <RowLayout layout>
  void multiply_tile_of(int64_t panel, Range rows, const float* x, const Patch& y, Prefetch prefetch) const {
    const Range columns = columns_of({panel, panel + 1});
    float* at = y.row(rows.begin) + (columns.begin - y.columns.begin);
    const bool whole = columns.size() == kPanelColumns;
    float edge[kTileRows * kPanelColumns];  // stands in for y where the last panel is wider than y
    multiply_tile<layout>(rows.size(), TileArgs<T>{.x = x,
                                                   .x_stride = x_.stride,
                                                   .panel = weights(panel),
                                                   .depth = in_,
                                                   .start = bias_ ? bias_ + columns.begin : kZeroColumns,
                                                   .start_stride = 0,
                                                   .y = whole ? at : edge,
                                                   .y_stride = whole ? y.stride : kPanelColumns,
                                                   .prefetch = prefetch});
    for (int64_t m = 0; !whole && m < rows.size(); ++m) {
      std::memcpy(at + m * y.stride, edge + m * kPanelColumns, columns.size() * sizeof(float));
    }
  }

  ConstRows x_;
  Epilogue epilogue_;
  float* y_;
  int64_t out_, in_;
  const T* panels_;
  const float* bias_;
  int64_t tiles_;
};

// Tasks of about kTaskBytes, as many for one thread as for another.
int64_t rounds_of_tasks(int64_t bytes) {
  const int64_t round = max_threads() * kTaskBytes;
  return max_threads() * std::max<int64_t>((bytes + round / 2) / round, 1);
}

void run(ConstRows x, const PackedLinear& w, const Epilogue& epilogue, float* y) {
  const int64_t in = w.in_features, panels = divide_up(w.out_features, kPanelColumns);
  const int64_t bytes = panels * kPanelColumns * in * item_size(w.dtype);
  with_type(w.dtype, [&](auto type) {
    const LinearTask<decltype(type)> task(x, w, epilogue, y);
    const int64_t tiles = task.tiles(), row_parts = divide_up(tiles, kTaskTiles);
    const int64_t groups = task.groups(), group_parts = std::min(rounds_of_tasks(bytes), groups);
    if (tiles == 1) {
      parallel_runs(group_parts, x.rows * bytes > (64 << 10),
                   [&](int64_t i) { task.run_one_tile(part(groups, group_parts, i)); });
    } else if (x.rows <= kSharedRows) {
      float* packed = thread_scratch(x.rows * in);
      const auto place = [&](Range some) { return packed + task.rows_of(some).begin * in; };
      parallel_for(tiles, x.rows * in > kPackSerially, [&](int64_t t) { task.pack(t, place({t, t + 1})); });
      parallel_runs(row_parts * group_parts, true, [&](int64_t i) {
        const Range some = part(tiles, row_parts, i % row_parts);
        task.run_packed(some, place(some), part(groups, group_parts, i / row_parts));
      });
    } else {
      const int64_t panel_parts = row_parts < kManyTasks * max_threads() ? 2 : 1;
      parallel_for(row_parts * panel_parts, true, [&](int64_t i) {
        const Range some = part(tiles, row_parts, i / panel_parts);
        float* packed = thread_scratch(kTaskTiles * kTileRows * in);
        float* end = packed;
        for (int64_t t = some.begin; t < some.end; ++t) {
          task.pack(t, end);
          end += task.rows_of({t, t + 1}).size() * in;
        }
        task.run_packed(some, packed, part(groups, panel_parts, i % panel_parts));
      });
    }
  });
}

}  // namespace

void linear(ConstRows x, const PackedLinear& w, const LoraPair* lora, Activation activation, float* y) {
  const int64_t out = w.out_features;
  if (activation != Activation::kNone && out / 2 % kPanelColumns != 0) {  // a panel would hold both gate and up
    const AlignedFloats product = aligned_floats(x.rows * out);
    linear(x, w, lora, Activation::kNone, product.get());
    gated({product.get(), x.rows, out}, out / 2, activation, y);
    return;
  }
  AlignedFloats shrunk;
  if (lora) {
    shrunk = aligned_floats(lora->rows.count * lora->a.slices * lora->a.max_rank);
    lora_shrink(x, lora->a, lora->rows, shrunk.get());
  }
  run(x, w, {lora, shrunk.get(), activation}, y);
}

}  // namespace mlserve
