// The Python side of the kernels: unpacks tensors, checks them, and releases the interpreter's lock around long work.
#include "binding.h"

#include <algorithm>
#include <optional>
#include <vector>

namespace mlserve {
namespace {

class Arena {
 public:
  PackedLinear pack(const Tensor& weight, const std::optional<Tensor>& bias) {
    use_torch_threads();
    require(weight.dim() == 2 && weight.is_cpu(), "a weight must be a matrix [out, in] on the CPU");
    const Tensor dense = weight.contiguous();
    std::optional<Tensor> dense_bias;
    if (bias) {
      require(bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_cpu(), "a bias must be [out] on the CPU");
      dense_bias = bias->to(at::kFloat).contiguous();
    }
    const DType dtype = dtype_of(dense);
    py::gil_scoped_release release;
    return pack_linear(arena_, dtype, dense.const_data_ptr(), dense.size(0), dense.size(1),
                       dense_bias ? dense_bias->const_data_ptr<float>() : nullptr);
  }

 private:
  WeightArena arena_;
};

Tensor linear_op(const Tensor& x, const PackedLinear& weight, int64_t activation) {
  return apply_linear(x, weight, nullptr, activation);
}

Tensor embedding_op(const Tensor& ids, const PackedLinear& table) {
  use_torch_threads();
  const int64_t count = ids.numel();
  const int64_t* data = index_data<int64_t>(ids, count, "ids must be a contiguous int64 tensor on the CPU");
  for (int64_t t = 0; t < count; ++t) {
    if (data[t] < 0 || data[t] >= table.out_features) {
      throw py::index_error("token id " + std::to_string(data[t]) + ", vocabulary " + std::to_string(table.out_features));
    }
  }
  Tensor y = new_matrix(count, table.in_features);
  embedding(data, count, table, y.data_ptr<float>());
  return y;
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  use_torch_threads();
  const int64_t width = weight.numel();
  require(weight.is_contiguous() && x.dim() >= 1 && x.size(-1) == width, "the norm's weight must have the rows' width");
  Tensor y = at::empty(x.sizes(), x.options(), at::MemoryFormat::Contiguous);
  if (y.numel() == 0) return y;
  // one row stride for all leading dimensions; heads in a wider qkv matrix have two
  const Tensor rows = x.dim() == 2 ? x : x.reshape({-1, width});
  rms_norm(rows_of(rows, width), width, dtype_of(weight), weight.const_data_ptr(), static_cast<float>(eps),
           y.data_ptr<float>());
  return y;
}

Tensor add_rms_norm_op(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  use_torch_threads();
  const int64_t width = weight.numel();
  const ConstRows rows = rows_of(x, width);
  require(weight.is_contiguous(), "the norm's weight must be contiguous");
  require(residual.sizes() == x.sizes() && residual.scalar_type() == at::kFloat && residual.is_contiguous(),
          "the residual must be a contiguous float32 matrix of x's shape");
  Tensor y = new_matrix(rows.rows, width);
  add_rms_norm(rows, residual.data_ptr<float>(), width, dtype_of(weight), weight.const_data_ptr(),
               static_cast<float>(eps), y.data_ptr<float>());
  return y;
}

struct Rotation {
  const float *cos, *sin;
  int64_t half;
};
Rotation rotation_of(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  const char* message = "cos and sin must be contiguous float32 [tokens, at most head_dim / 2]";
  require(cos.dim() == 2 && cos.size(0) == q.size(0) && cos.sizes() == sin.sizes() && k.size(0) == q.size(0) &&
              2 * cos.size(1) <= std::min(q.size(2), k.size(2)),
          message);
  return {float_data(cos, message), float_data(sin, message), cos.size(1)};
}

void rope_op(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  use_torch_threads();
  const Heads queries = heads_of(q), keys = heads_of(k);
  const Rotation r = rotation_of(q, k, cos, sin);
  rope(queries, r.cos, r.sin, r.half);
  rope(keys, r.cos, r.sin, r.half);
}

// Where each token's keys and values go, checked.
const int64_t* slots_of(const Tensor& k, const Tensor& v, const Tensor& kv, const Tensor& slot_mapping) {
  require(k.sizes() == v.sizes() && k.size(1) == kv.size(3) && k.size(2) == kv.size(4),
          "k and v must be [tokens, kv_heads, head_dim] like kv");
  const int64_t tokens = k.size(0), capacity = kv.size(0) * kv.size(2);
  const int64_t* slots = index_data<int64_t>(slot_mapping, tokens, "slot_mapping must be contiguous int64 [tokens]");
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0 || slots[t] >= capacity) {
      throw py::index_error("slot " + std::to_string(slots[t]) + ", the cache has " + std::to_string(capacity));
    }
  }
  return slots;
}

void kv_write_op(const Tensor& k, const Tensor& v, const Tensor& kv, const Tensor& slot_mapping) {
  use_torch_threads();
  const Heads keys = heads_of(k), values = heads_of(v);
  const PagedKV cache = kv_of(kv);
  kv_write(keys, values, cache, slots_of(k, v, kv, slot_mapping));
}

void rope_kv_write_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                      const Tensor& kv, const Tensor& slot_mapping) {
  use_torch_threads();
  const Heads queries = heads_of(q), keys = heads_of(k), values = heads_of(v);
  const PagedKV cache = kv_of(kv);
  const Rotation r = rotation_of(q, k, cos, sin);
  rope_kv_write(queries, keys, values, r.cos, r.sin, r.half, cache, slots_of(k, v, kv, slot_mapping));
}

// Every block that a sequence's context reaches is in its table and in the cache; queries are in order and within q.
void check_sequences(const Sequences& s, int64_t tokens, int64_t block_size, int64_t num_blocks, int64_t table_size) {
  require(s.query_starts[0] == 0 && s.query_starts[s.count] == tokens, "query_starts must go from 0 to the rows of q");
  require(s.block_starts[0] >= 0 && s.block_starts[s.count] <= table_size, "block_starts must stay within block_table");
  for (int64_t i = 0; i < s.count; ++i) {
    const int64_t queries = s.query_starts[i + 1] - s.query_starts[i], context = s.context_lens[i];
    require(queries >= 0 && queries <= context, "a sequence has more queries than context");
    const int64_t blocks = (context + block_size - 1) / block_size;
    require(blocks <= s.block_starts[i + 1] - s.block_starts[i], "a sequence's context is longer than its blocks");
    const int32_t* table = s.block_table + s.block_starts[i];
    for (int64_t b = 0; b < blocks; ++b) {
      if (table[b] < 0 || table[b] >= num_blocks) {
        throw py::index_error("block " + std::to_string(table[b]) + ", the cache has " + std::to_string(num_blocks));
      }
    }
    for (int64_t q = 0; s.visible_ends && q < queries; ++q) {
      const int32_t* ends = s.visible_ends + s.query_starts[i];
      require(ends[q] > context - queries + q && ends[q] <= context && (q == 0 || ends[q] >= ends[q - 1]),
              "visible_ends must lie behind each query, within its context, and never fall");
    }
  }
}

Tensor paged_attention_op(const Tensor& q, const Tensor& kv, const Tensor& query_starts, const Tensor& context_lens,
                          const Tensor& block_table, const Tensor& block_starts,
                          const std::optional<Tensor>& visible_ends, double scale, std::optional<int64_t> window,
                          std::optional<double> soft_cap) {
  use_torch_threads();
  const Heads queries = heads_of(q);
  const PagedKV cache = kv_of(kv);
  require(q.size(2) == cache.head_dim && queries.heads % cache.kv_heads == 0,
          "q must be [tokens, a multiple of kv_heads, head_dim]");
  const int64_t count = context_lens.numel();
  const char* message = "a batch's index tensors must be contiguous int32 on the CPU, of one length";
  const Sequences sequences{count, index_data<int32_t>(query_starts, count + 1, message),
                            index_data<int32_t>(context_lens, count, message),
                            index_data<int32_t>(block_table, block_table.numel(), message),
                            index_data<int32_t>(block_starts, count + 1, message),
                            visible_ends ? index_data<int32_t>(*visible_ends, queries.tokens, message) : nullptr};
  check_sequences(sequences, queries.tokens, cache.block_size, kv.size(0), block_table.numel());
  AttentionOptions options{.scale = static_cast<float>(scale)};
  if (window) {
    require(*window > 0, "window must be above 0");
    options.window = *window;
  }
  if (soft_cap) {
    require(*soft_cap > 0, "soft_cap must be above 0");
    options.soft_cap = static_cast<float>(*soft_cap);
    options.has_soft_cap = true;
  }
  Tensor out = new_matrix(queries.tokens, queries.heads * cache.head_dim);
  float* data = out.data_ptr<float>();
  py::gil_scoped_release release;
  paged_attention(queries, cache, sequences, options, data);
  return out;
}

Tensor gated_op(const Tensor& gate_up, int64_t activation) {
  use_torch_threads();
  require(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up must be [tokens, 2 * width]");
  const int64_t width = gate_up.size(1) / 2;
  const ConstRows rows = rows_of(gate_up, 2 * width);
  Tensor y = new_matrix(rows.rows, width);
  gated(rows, width, activation_of(activation), y.data_ptr<float>());
  return y;
}

}  // namespace
}  // namespace mlserve

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace mlserve;
  py::class_<PackedLinear>(m, "PackedLinear")
      .def_readonly("out_features", &PackedLinear::out_features)
      .def_readonly("in_features", &PackedLinear::in_features);
  py::class_<Arena>(m, "Arena").def(py::init<>()).def("pack", &Arena::pack);
  m.def("linear", &linear_op);
  m.def("embedding", &embedding_op);
  m.def("rms_norm", &rms_norm_op);
  m.def("add_rms_norm", &add_rms_norm_op);
  m.def("rope_", &rope_op);
  m.def("kv_write", &kv_write_op);
  m.def("rope_kv_write", &rope_kv_write_op);
  m.def("paged_attention", &paged_attention_op);
  m.def("gated_activation", &gated_op);
  bind_lora(m);
}
