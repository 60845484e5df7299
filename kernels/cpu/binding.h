// What both files of the Python binding share: tensors unpacked, and checked for what memory safety depends on.
//
// Only they need torch's headers.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "kernels.h"

namespace mlserve {

namespace py = pybind11;
using at::Tensor;

// Every entry calls this: a Python thread that hasn't run torch yet would otherwise use all cores, whatever torch was told.
inline void use_torch_threads() { at::internal::lazy_init_num_threads(); }

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default: throw py::type_error(std::string("dtype ") + c10::toString(t.scalar_type()) + ": use float32, bfloat16 or float16");
  }
}

inline void require(bool condition, const char* message) {
  if (!condition) throw py::value_error(message);
}

inline const float* float_data(const Tensor& t, const char* message) {
  require(t.scalar_type() == at::kFloat && t.is_cpu() && t.is_contiguous(), message);
  return t.const_data_ptr<float>();
}

template <class T>
inline const T* index_data(const Tensor& t, int64_t count, const char* message) {
  require(t.scalar_type() == c10::CppTypeToScalarType<T>::value && t.is_cpu() && t.is_contiguous() && t.numel() == count, message);
  return t.const_data_ptr<T>();
}

inline ConstRows rows_of(const Tensor& x, int64_t width) {
  require(x.dim() == 2 && x.size(1) == width && x.scalar_type() == at::kFloat && x.is_cpu(),
          "rows must be a float32 matrix on the CPU of the weight's width");
  require(x.stride(1) == 1 || width <= 1, "rows must be dense along their last dimension");
  return {x.const_data_ptr<float>(), x.size(0), x.stride(0)};
}

inline Heads heads_of(const Tensor& x) {
  require(x.dim() == 3 && x.scalar_type() == at::kFloat && x.is_cpu() && x.stride(2) == 1,
          "heads must be float32 [tokens, heads, head_dim] on the CPU, dense along head_dim");
  return {x.data_ptr<float>(), x.size(0), x.size(1), x.stride(0), x.stride(1)};
}

inline PagedKV kv_of(const Tensor& kv) {
  require(kv.dim() == 5 && kv.size(1) == 2 && kv.is_cpu() && kv.stride(4) == 1,
          "kv must be [blocks, 2, block_size, kv_heads, head_dim] on the CPU, dense along head_dim");
  require(kv.size(4) % kLanes == 0, "head_dim must be a multiple of 8: use kernels='reference'");
  return {dtype_of(kv),   kv.data_ptr(),  kv.size(2),   kv.size(3),  kv.size(4),
          kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3)};
}

inline Tensor new_matrix(int64_t rows, int64_t columns) {
  return at::empty({rows, columns}, at::TensorOptions().dtype(at::kFloat));
}

// As mlserve.kernels.cpu.ops counts them.
inline Activation activation_of(int64_t number) {
  require(number >= 0 && number <= 2, "an activation is 0 (none), 1 (silu) or 2 (gelu_tanh)");
  return static_cast<Activation>(number);
}

inline Tensor apply_linear(const Tensor& x, const PackedLinear& weight, const LoraPair* lora, int64_t activation) {
  use_torch_threads();
  const ConstRows rows = rows_of(x, weight.in_features);
  const Activation gate = activation_of(activation);
  require(gate == Activation::kNone || weight.out_features % 2 == 0, "a gated weight must be [2 * width, in]");
  Tensor y = new_matrix(rows.rows, gate == Activation::kNone ? weight.out_features : weight.out_features / 2);
  float* out = y.data_ptr<float>();
  py::gil_scoped_release release;
  linear(rows, weight, lora, gate, out);
  return y;
}

void bind_lora(py::module_& m);  // binding_lora.cpp

}  // namespace mlserve
