// The Python side of the adapters' kernels.
#include <algorithm>
#include <vector>

#include "binding.h"

namespace mlserve {
namespace {

void check_index(int64_t index, int64_t size, const char* what, const char* owner) {
  if (index < 0 || index >= size) {
    throw py::index_error(what + std::to_string(index) + owner + std::to_string(size));
  }
}

// All that the adapters' kernels reach by index: rows of the step, slots, and ranks of the slots in use.
AdapterRows adapter_rows(const Tensor& order, const Tensor& starts, const Tensor& slots, const Tensor& ranks,
                         int64_t tokens, int64_t num_slots, int64_t slices, int64_t max_rank) {
  const char* message = "segments must be contiguous on the CPU: order int64, starts int32 (one more than slots), slots int32";
  const AdapterRows rows{order.numel(), slots.numel(), index_data<int64_t>(order, order.numel(), message),
                         index_data<int32_t>(starts, slots.numel() + 1, message),
                         index_data<int32_t>(slots, slots.numel(), message)};
  require(ranks.dim() == 2 && ranks.size(0) == num_slots && ranks.size(1) == slices, "ranks must be [slots, slices]");
  const int32_t* rank = index_data<int32_t>(ranks, num_slots * slices, "ranks must be contiguous int32 on the CPU");
  require(rows.starts[0] == 0 && rows.starts[rows.segments] == rows.count, "starts must go from 0 to the length of order");
  for (int64_t g = 0; g < rows.segments; ++g) {
    require(rows.starts[g] <= rows.starts[g + 1], "starts must not descend");
    check_index(rows.slots[g], num_slots, "slot ", ", there are ");
    for (int64_t k = 0; k < slices; ++k) {
      check_index(rank[rows.slots[g] * slices + k], max_rank + 1, "rank ", ", must be below ");
    }
  }
  for (int64_t n = 0; n < rows.count; ++n) check_index(rows.order[n], tokens, "row ", ", the step has ");
  for (int64_t g = 0; g < rows.segments; ++g) {
    require(std::is_sorted(rows.order + rows.starts[g], rows.order + rows.starts[g + 1]),
            "order must not descend within a segment");
  }
  return rows;
}

void check_a(const Tensor& a) {
  require(a.dim() == 4 && a.is_cpu() && (a.stride(3) == 1 || a.size(3) <= 1),
          "a must be [slots, slices, max rank, in] on the CPU, dense along in");
}

void check_b(const Tensor& b) {
  require(b.dim() == 3 && b.is_cpu() && (b.stride(2) == 1 || b.size(2) <= 1),
          "b must be [slots, max rank, out] on the CPU, dense along out");
}

void check_starts(const std::vector<int64_t>& out_starts, const Tensor& b) {
  require(out_starts.size() >= 2 && out_starts.front() == 0 && out_starts.back() == b.size(2) &&
              std::is_sorted(out_starts.begin(), out_starts.end()),
          "out_starts must ascend from 0 to the columns of b");
}

// Of tensors that have been checked, ranks by adapter_rows.
LoraA lora_a(const Tensor& a, const Tensor& ranks) {
  return {dtype_of(a), a.const_data_ptr(), a.size(1),   a.size(2), a.size(3),
          a.stride(0), a.stride(1),        a.stride(2), ranks.const_data_ptr<int32_t>()};
}
LoraB lora_b(const Tensor& b, const Tensor& ranks, const std::vector<int64_t>& out_starts) {
  return {dtype_of(b), b.const_data_ptr(), static_cast<int64_t>(out_starts.size()) - 1, b.size(1), b.stride(0),
          b.stride(1), ranks.const_data_ptr<int32_t>(), out_starts.data()};
}

Tensor lora_shrink_op(const Tensor& x, const Tensor& a, const Tensor& ranks, const Tensor& order, const Tensor& starts,
                      const Tensor& slots) {
  use_torch_threads();
  check_a(a);
  const ConstRows inputs = rows_of(x, a.size(3));
  const AdapterRows rows = adapter_rows(order, starts, slots, ranks, inputs.rows, a.size(0), a.size(1), a.size(2));
  const LoraA lora = lora_a(a, ranks);
  Tensor shrunk = at::empty({rows.count, lora.slices, lora.max_rank}, at::TensorOptions().dtype(at::kFloat));
  float* out = shrunk.data_ptr<float>();
  py::gil_scoped_release release;
  lora_shrink(inputs, lora, rows, out);
  return shrunk;
}

void lora_expand_op(const Tensor& shrunk, const Tensor& b, const Tensor& ranks, const std::vector<int64_t>& out_starts,
                    const Tensor& order, const Tensor& starts, const Tensor& slots, const Tensor& y) {
  use_torch_threads();
  check_b(b);
  const ConstRows outputs = rows_of(y, b.size(2));
  check_starts(out_starts, b);
  const int64_t slices = static_cast<int64_t>(out_starts.size()) - 1;
  const AdapterRows rows = adapter_rows(order, starts, slots, ranks, outputs.rows, b.size(0), slices, b.size(1));
  const char* message = "shrunk must be contiguous float32 [length of order, slices, max rank] on the CPU";
  require(shrunk.dim() == 3 && shrunk.size(0) == rows.count && shrunk.size(1) == slices && shrunk.size(2) == b.size(1),
          message);
  const float* factors = float_data(shrunk, message);
  const LoraB lora = lora_b(b, ranks, out_starts);
  const MutableRows sums{y.data_ptr<float>(), outputs.rows, outputs.stride};
  py::gil_scoped_release release;
  lora_expand(factors, lora, rows, sums);
}

Tensor lora_linear_op(const Tensor& x, const PackedLinear& weight, int64_t activation, const Tensor& a, const Tensor& b,
                      const Tensor& ranks, const std::vector<int64_t>& out_starts, const Tensor& order,
                      const Tensor& starts, const Tensor& slots) {
  check_a(a);
  check_b(b);
  check_starts(out_starts, b);
  require(a.size(0) == b.size(0) && a.size(1) + 1 == static_cast<int64_t>(out_starts.size()) && a.size(2) == b.size(1),
          "a and b must have the same slots, slices and max rank");
  require(a.size(3) == weight.in_features && b.size(2) == weight.out_features, "a and b must have the weight's shape");
  const int64_t tokens = rows_of(x, weight.in_features).rows;
  const AdapterRows rows = adapter_rows(order, starts, slots, ranks, tokens, a.size(0), a.size(1), a.size(2));
  const LoraPair lora{lora_a(a, ranks), lora_b(b, ranks, out_starts), rows};
  return apply_linear(x, weight, &lora, activation);
}

}  // namespace

void bind_lora(py::module_& m) {
  m.def("lora_shrink", &lora_shrink_op);
  m.def("lora_expand_", &lora_expand_op);
  m.def("lora_linear", &lora_linear_op);
}

}  // namespace mlserve
