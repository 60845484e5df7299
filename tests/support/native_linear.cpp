// The native linear for ctypes, so that a test can build it with other flags than the library's.
#include "columns.h"
#include "kernels.h"

extern "C" int tile_rows() { return mlserve::kTileRows; }

// y[rows, out] = bias + x[rows, in] @ weight[out, in]^T; dtype counts mlserve::DType, bias may be null
extern "C" void linear(int dtype, const void* weight, const float* bias, int64_t out, int64_t in, const float* x,
                       int64_t rows, int64_t x_stride, float* y) {
  mlserve::WeightArena arena;
  const auto packed = mlserve::pack_linear(arena, static_cast<mlserve::DType>(dtype), weight, out, in, bias);
  mlserve::linear(mlserve::ConstRows{x, rows, x_stride}, packed, nullptr, mlserve::Activation::kNone, y);
}

extern "C" void embedding(int dtype, const void* weight, int64_t out, int64_t in, const int64_t* ids, int64_t count,
                          float* y) {
  mlserve::WeightArena arena;
  const auto packed = mlserve::pack_linear(arena, static_cast<mlserve::DType>(dtype), weight, out, in, nullptr);
  mlserve::embedding(ids, count, packed, y);
}
