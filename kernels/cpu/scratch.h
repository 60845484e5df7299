// Working memory of the kernels, in floats, uninitialised.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"

namespace mlserve {

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using AlignedFloats = std::unique_ptr<float[], Free>;

// Aligned to cache lines: a vector that straddles two lines costs two loads.
inline AlignedFloats aligned_floats(int64_t count) {
  auto* p = static_cast<float*>(std::aligned_alloc(64, divide_up(count, 16) * 64));
  if (!p) throw std::bad_alloc();
  return AlignedFloats(p);
}

// A buffer of the calling thread that only grows; what it holds is undefined.
inline float* thread_scratch(int64_t count) {
  thread_local AlignedFloats scratch;
  thread_local int64_t size = 0;
  if (size < count) {
    scratch = aligned_floats(count);
    size = count;
  }
  return scratch.get();
}

}  // namespace mlserve
