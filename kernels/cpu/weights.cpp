// Weights in panels (see panels.h), in memory of their own.
#include <sys/mman.h>

#include <new>

#include "columns.h"
#include "kernels.h"
#include "parallel.h"

namespace mlserve {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunkBytes = std::size_t{64} << 20;

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
