// Low-rank adapters on the rows of a step, each row with its own adapter's matrices (SGMV of Punica, Chen et al. 2023).
//
// Nothing is copied or gathered: rows are reached through the step's order, matrices where the adapters' slots lie. A
// segment of one or two rows is bound by reading its adapter from memory; one of many rows by arithmetic, in tiles of 3
// rows by 4 ranks or by 32 columns: 12 accumulators in registers and 7 loads for 12 FMAs.
//
// Every number is summed in an order of its own, whatever tile it falls into: a row's result has the same bits alone
// and in any batch.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace mlserve {
namespace {

constexpr int kTileRows = 3;
constexpr int kTileRanks = 4;
constexpr int kTileVecs = 4;
constexpr int64_t kTileColumns = kTileVecs * kLanes;

constexpr int64_t kBlockBytes = 192 << 10;  // rows of x that one task keeps in its L2 cache
constexpr int64_t kExpandRows = 48;
constexpr int64_t kChunkBytes = 16 << 10;   // columns of b that stay in the L1 cache while a task's rows go by
constexpr int64_t kTasks = 8;               // at least, where rows are few, so that threads end together
constexpr int64_t kReadCost = 8;            // products in the time that one number takes to come from memory
constexpr int64_t kSerialWork = 256 << 10;  // products below which one thread is sooner done than two are woken

struct RowBlock {  // rows order[begin] .. order[end - 1] of one slot
  int64_t begin, end, slot;
};

std::vector<RowBlock> row_blocks(const AdapterRows& rows, int64_t max_rows) {
  std::vector<RowBlock> blocks;
  blocks.reserve(rows.segments + rows.count / max_rows);
  for (int64_t g = 0; g < rows.segments; ++g) {
    for (int64_t n = rows.starts[g]; n < rows.starts[g + 1]; n += max_rows) {
      blocks.push_back({n, std::min<int64_t>(n + max_rows, rows.starts[g + 1]), rows.slots[g]});
    }
  }
  return blocks;
}

// In products, with `width` numbers for each rank.
int64_t work_of(const std::vector<RowBlock>& blocks, const int32_t* ranks, int64_t slices, int64_t width) {
  int64_t work = 0;
  for (const RowBlock& block : blocks) {
    const int32_t* rank = ranks + block.slot * slices;
    work += (block.end - block.begin + kReadCost) * std::accumulate(rank, rank + slices, int64_t{0});
  }
  return work * width;
}

template <class T>
class Shrink {
 public:
  Shrink(ConstRows x, const LoraA& a, const AdapterRows& rows, float* out) : x_(x), a_(a), rows_(rows), out_(out) {}

  // All slices' groups of 4 ranks are dealt out to the parts in turn.
  void multiply(const RowBlock& block, int64_t part, int64_t parts) const {
    int64_t group = 0;
    for (int64_t k = 0; k < a_.slices; ++k) {
      const int64_t rank = a_.ranks[block.slot * a_.slices + k];
      for (int64_t j = 0; j < rank; j += kTileRanks, ++group) {
        if (group % parts == part) multiply_group(block, k, j, rank);
      }
    }
  }

 private:
  void multiply_group(const RowBlock& block, int64_t k, int64_t j, int64_t rank) const {
    const T* a[kTileRanks];  // beyond the rank its last row again: what lies there is garbage
    for (int64_t i = 0; i < kTileRanks; ++i) {
      a[i] = static_cast<const T*>(a_.data) + block.slot * a_.slot_stride + k * a_.slice_stride +
             std::min(j + i, rank - 1) * a_.rank_stride;
    }
    const int64_t count = std::min<int64_t>(kTileRanks, rank - j);
    float* out = out_ + k * a_.max_rank + j;
    for (int64_t n = block.begin; n < block.end; n += kTileRows) {
      switch (block.end - n) {
        case 1: multiply_tile<1>(n, a, out, count); break;
        case 2: multiply_tile<2>(n, a, out, count); break;
        default: multiply_tile<kTileRows>(n, a, out, count);
      }
    }
  }

  template <int kRows>
  void multiply_tile(int64_t n, const T* const* a, float* out, int64_t count) const {
    const float* x[kRows];
    Vec sums[kRows][kTileRanks];
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      x[m] = x_.data + rows_.order[n + m] * x_.stride;
#pragma GCC unroll 4
      for (int i = 0; i < kTileRanks; ++i) sums[m][i] = zero();
    }
    const auto add = [&](const auto& load_at) __attribute__((always_inline)) {
      Vec inputs[kRows];
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) inputs[m] = load_at(x[m]);
#pragma GCC unroll 4
      for (int i = 0; i < kTileRanks; ++i) {
        const Vec weights = load_at(a[i]);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) sums[m][i] = fma(inputs[m], weights, sums[m][i]);
      }
    };
    int64_t h = 0;
    for (; h + kLanes <= a_.in; h += kLanes) add([h](const auto* p) { return load(p + h); });
    if (h < a_.in) add([h, this](const auto* p) { return load_partial(p + h, a_.in - h); });
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      float four[kTileRanks];
      _mm_storeu_ps(four, sum4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]));
      std::copy_n(four, count, out + (n + m) * a_.slices * a_.max_rank);
    }
  }

  ConstRows x_;
  LoraA a_;
  AdapterRows rows_;
  float* out_;
};

template <class T>
class Expand {
 public:
  Expand(const float* shrunk, const LoraB& b, const AdapterRows& rows, const Patch& y)
      : shrunk_(shrunk), b_(b), rows_(rows), y_(y) {}

  // y[the block's rows, columns begin .. end - 1] += shrunk @ b
  void add(const RowBlock& block, int64_t begin, int64_t end) const {
    for (int64_t k = 0; k < b_.slices; ++k) {
      const int64_t rank = b_.ranks[block.slot * b_.slices + k];
      if (rank == 0) continue;
      const int64_t first = std::max(begin, b_.out_starts[k]), last = std::min(end, b_.out_starts[k + 1]);
      const int64_t fitting = kChunkBytes / (rank * static_cast<int64_t>(sizeof(T)));
      const int64_t step = std::max(fitting / kTileColumns, int64_t{1}) * kTileColumns;
      for (int64_t c = first; c < last; c += step) add_chunk(block, k, rank, c, std::min(c + step, last));
    }
  }

 private:
  void add_chunk(const RowBlock& block, int64_t k, int64_t rank, int64_t begin, int64_t end) const {
    for (int64_t n = block.begin; n < block.end; n += kTileRows) {
      switch (block.end - n) {
        case 1: add_rows<1>(n, block.slot, k, rank, begin, end); break;
        case 2: add_rows<2>(n, block.slot, k, rank, begin, end); break;
        default: add_rows<kTileRows>(n, block.slot, k, rank, begin, end);
      }
    }
  }

  template <int kRows>
  void add_rows(int64_t n, int64_t slot, int64_t k, int64_t rank, int64_t begin, int64_t end) const {
    const float* factors = shrunk_ + (n * b_.slices + k) * b_.max_rank;
    float* y[kRows];
    for (int m = 0; m < kRows; ++m) y[m] = y_.row(rows_.order[n + m]);
    const T* b = static_cast<const T*>(b_.data) + slot * b_.slot_stride;
    const auto whole = [](const auto* p) { return load(p); };
    int64_t c = begin;
    for (; c + kTileColumns <= end; c += kTileColumns) {
      add_tile<kRows, kTileVecs>(factors, b + c, rank, y, c, whole, [](float* p, Vec v) { store(p, v); });
    }
    for (; c + kLanes <= end; c += kLanes) {
      add_tile<kRows, 1>(factors, b + c, rank, y, c, whole, [](float* p, Vec v) { store(p, v); });
    }
    if (const int64_t rest = end - c; rest > 0) {
      add_tile<kRows, 1>(
          factors, b + c, rank, y, c, [rest](const auto* p) { return load_partial(p, rest); },
          [rest](float* p, Vec v) { store_partial(p, v, rest); });
    }
  }

  template <int kRows, int kVecs, class Load, class Store>
  void add_tile(const float* factors, const T* b, int64_t rank, float* const* y, int64_t c, const Load& load_at,
                const Store& store_at) const {
    const int64_t row_stride = b_.slices * b_.max_rank;
    Vec sums[kRows][kVecs];
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[m][v] = zero();
    }
    for (int64_t j = 0; j < rank; ++j, b += b_.rank_stride) {
      Vec factor[kRows];
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) factor[m] = _mm256_broadcast_ss(factors + m * row_stride + j);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec weights = load_at(b + v * kLanes);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) sums[m][v] = fma(factor[m], weights, sums[m][v]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        float* at = y[m] + (c - y_.columns.begin) + v * kLanes;
        store_at(at, _mm256_add_ps(load_at(at), sums[m][v]));
      }
    }
  }

  const float* shrunk_;
  LoraB b_;
  AdapterRows rows_;
  Patch y_;
};

}  // namespace

void lora_shrink(ConstRows x, const LoraA& a, const AdapterRows& rows, float* out) {
  const int64_t fitting = kBlockBytes / (std::max<int64_t>(a.in, 1) * static_cast<int64_t>(sizeof(float)));
  const std::vector<RowBlock> blocks = row_blocks(rows, std::clamp<int64_t>(fitting / kTileRows, 4, 16) * kTileRows);
  const int64_t count = static_cast<int64_t>(blocks.size());
  const int64_t parts = count == 0 ? 1 : divide_up(kTasks, count);
  with_type(a.dtype, [&](auto type) {
    const Shrink<decltype(type)> shrink(x, a, rows, out);
    parallel_for(count * parts, work_of(blocks, a.ranks, a.slices, a.in) > kSerialWork,
                 [&](int64_t i) { shrink.multiply(blocks[i / parts], i % parts, parts); });
  });
}

void lora_expand(const float* shrunk, const LoraB& b, const AdapterRows& rows, MutableRows y) {
  const std::vector<RowBlock> blocks = row_blocks(rows, kExpandRows);
  const int64_t count = static_cast<int64_t>(blocks.size());
  const int64_t out = b.out_starts[b.slices], tiles = divide_up(out, kTileColumns);
  const int64_t parts = count == 0 ? 1 : divide_up(kTasks, count);
  const auto column = [&](int64_t part) { return std::min(out, tiles * part / parts * kTileColumns); };
  with_type(b.dtype, [&](auto type) {
    const Expand<decltype(type)> expand(shrunk, b, rows, {y.data, y.stride, {0, y.rows}, {0, out}});
    parallel_for(count * parts, work_of(blocks, b.ranks, b.slices, out / b.slices) > kSerialWork, [&](int64_t i) {
      expand.add(blocks[i / parts], column(i % parts), column(i % parts + 1));
    });
  });
}

void lora_expand(const float* shrunk, const LoraB& b, const AdapterRows& rows, const Patch& y) {
  with_type(b.dtype, [&](auto type) {
    const Expand<decltype(type)> expand(shrunk, b, rows, y);
    for (int64_t g = 0; g < rows.segments; ++g) {
      const int64_t *first = rows.order + rows.starts[g], *last = rows.order + rows.starts[g + 1];
      const int64_t* begin = std::lower_bound(first, last, y.rows.begin);
      const int64_t* end = std::lower_bound(begin, last, y.rows.end);
      if (begin < end) expand.add({begin - rows.order, end - rows.order, rows.slots[g]}, y.columns.begin, y.columns.end);
    }
  });
}

}  // namespace mlserve
