// Cuts a step's attention into tasks, runs them on the thread pool, and joins the parts of long contexts.
//
// How a sequence is cut depends on nothing but the sequence, so its results have the same bits in any batch.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <vector>

#include "parallel.h"

namespace mlserve {
namespace {

constexpr int64_t kDecodeKeys = 128;       // keys of one decode task: a single sequence of 256 keys keeps two threads busy
constexpr int64_t kTileFloats = 12 << 10;  // of a prefill task's queries: 48 kB, and as much for scores and sums
constexpr int64_t kMinPrefillTasks = 8;    // a sequence that has fewer tasks is cut along its keys,
constexpr int64_t kMinPrefillKeys = 256;   // into ranges no shorter than this
constexpr int64_t kSerialWork = 32 << 10;  // multiplications below which one thread is sooner done than two are woken

// Tasks of the same rows and different keys, which follow each other. The one that ends last joins their results.
struct Group {
  int64_t first_task, parts;
  std::atomic<int64_t> running;
  Group(int64_t first, int64_t count) : first_task(first), parts(count), running(count) {}
};

struct PlannedTask {
  AttentionTask task;
  Group* group;
  int64_t state_start;  // of its SoftmaxState in the step's scratch
};

class Attention {
 public:
  Attention(Heads q, const PagedKV& kv, const Sequences& sequences, const AttentionOptions& options, float* out)
      : q_(q), kv_(kv), options_(options), out_(out), width_(padded_width(kv.head_dim)) {
    // prefill first: its tasks are the long ones, and the short ones fill the gaps at the end
    for (int64_t s = 0; s < sequences.count; ++s) {
      if (query_len(sequences, s) > 1) plan_prefill(sequences, s);
    }
    for (int64_t s = 0; s < sequences.count; ++s) {
      if (query_len(sequences, s) == 1) plan_decode(sequences, s);
    }
  }

  void run() {
    scratch_ = aligned_floats(scratch_floats_);
    parallel_for(static_cast<int64_t>(tasks_.size()), work_ > kSerialWork, [&](int64_t i) { run_task(tasks_[i]); });
  }

 private:
  static int64_t query_len(const Sequences& sequences, int64_t s) {
    return sequences.query_starts[s + 1] - sequences.query_starts[s];
  }

  void plan_decode(const Sequences& sequences, int64_t s) {
    const int64_t context = sequences.context_lens[s];
    AttentionTask task{.first_query = sequences.query_starts[s],
                       .queries = 1,
                       .first_position = context - 1,
                       .first_head = 0,
                       .heads = q_.heads,
                       .first_key = std::max<int64_t>(context - std::min(context, options_.window), 0),
                       .end_key = context,
                       .blocks = sequences.block_table + sequences.block_starts[s],
                       .visible_ends = nullptr};
    add_group(task, divide_up(task.end_key - task.first_key, kDecodeKeys));
  }

  // Tiles of queries, times KV heads; the last tile, which has the most keys, comes first.
  void plan_prefill(const Sequences& sequences, int64_t s) {
    const int64_t group = q_.heads / kv_.kv_heads, queries = query_len(sequences, s);
    const int64_t first_position = sequences.context_lens[s] - queries;
    const int64_t tile = std::max<int64_t>(kTileFloats / (kv_.head_dim * group), 1);
    const int64_t tiles = divide_up(queries, tile);
    const int64_t key_parts = std::max<int64_t>(kMinPrefillTasks / (tiles * kv_.kv_heads), 1);
    for (int64_t i = tiles - 1; i >= 0; --i) {
      const int64_t begin = queries * i / tiles, end = queries * (i + 1) / tiles;
      for (int64_t head = 0; head < kv_.kv_heads; ++head) {
        const int64_t position = first_position + begin;
        AttentionTask task{.first_query = sequences.query_starts[s] + begin,
                           .queries = end - begin,
                           .first_position = position,
                           .first_head = head * group,
                           .heads = group,
                           .first_key = position < options_.window ? 0 : position - options_.window + 1,
                           .end_key = 0,
                           .blocks = sequences.block_table + sequences.block_starts[s],
                           .visible_ends = sequences.visible_ends
                                               ? sequences.visible_ends + sequences.query_starts[s] + begin
                                               : nullptr};
        task.end_key = task.visible_end(task.queries - 1);
        add_group(task, std::min(key_parts, divide_up(task.end_key - task.first_key, kMinPrefillKeys)));
      }
    }
  }

  void add_group(AttentionTask task, int64_t parts) {
    Group& group = groups_.emplace_back(static_cast<int64_t>(tasks_.size()), parts);
    const int64_t begin = task.first_key, keys = task.end_key - begin;
    for (int64_t i = 0; i < parts; ++i) {
      task.first_key = begin + keys * i / parts;
      task.end_key = begin + keys * (i + 1) / parts;
      tasks_.push_back({task, &group, scratch_floats_});
      scratch_floats_ += divide_up(task.rows() * (width_ + 2), 16) * 16;
    }
    work_ += task.rows() * keys * kv_.head_dim;
  }

  SoftmaxState state(const PlannedTask& planned) const {
    const int64_t rows = planned.task.rows();
    float* out = scratch_.get() + planned.state_start;
    return {out, out + rows * width_, out + rows * (width_ + 1)};
  }

  void run_task(const PlannedTask& planned) {
    const AttentionTask& task = planned.task;
    const SoftmaxState s = state(planned);
    const int64_t rows = task.rows();
    std::fill(s.out, s.out + rows * width_, 0.0f);
    std::fill(s.peak, s.peak + rows, -INFINITY);
    std::fill(s.total, s.total + rows, 0.0f);
    if (task.queries == 1) {
      attend_decode(task, q_, kv_, options_, s);
    } else {
      attend_prefill(task, q_, kv_, options_, s);
    }
    if (planned.group->running.fetch_sub(1, std::memory_order_acq_rel) == 1) join(*planned.group);
  }

  // out = sum over parts of exp(peak_i - peak) out_i / the same sum of total_i
  void join(const Group& group) {
    const PlannedTask* parts = &tasks_[group.first_task];
    const AttentionTask& task = parts->task;
    for (int64_t r = 0; r < task.rows(); ++r) {
      float peak = -INFINITY, total = 0;
      for (int64_t i = 0; i < group.parts; ++i) peak = std::max(peak, state(parts[i]).peak[r]);
      float* out = out_ + ((task.first_query + r / task.heads) * q_.heads + task.first_head + r % task.heads) * kv_.head_dim;
      std::fill(out, out + kv_.head_dim, 0.0f);
      for (int64_t i = 0; i < group.parts; ++i) {
        const SoftmaxState part = state(parts[i]);
        const float scale = std::exp(part.peak[r] - peak);
        total += scale * part.total[r];
        add_scaled(part.out + r * width_, scale, out);
      }
      const Vec inverse = splat(1.0f / total);
      for (int64_t d = 0; d < kv_.head_dim; d += kLanes) store(out + d, _mm256_mul_ps(load(out + d), inverse));
    }
  }

  void add_scaled(const float* x, float scale, float* y) const {
    for (int64_t d = 0; d < kv_.head_dim; d += kLanes) store(y + d, fma(splat(scale), load(x + d), load(y + d)));
  }

  Heads q_;
  const PagedKV& kv_;
  const AttentionOptions& options_;
  float* out_;
  int64_t width_;  // of a row of sums: head_dim, rounded up to a panel
  std::vector<PlannedTask> tasks_;
  std::deque<Group> groups_;  // a deque, as its elements stay where they are
  AlignedFloats scratch_;     // all tasks' SoftmaxStates
  int64_t scratch_floats_ = 0, work_ = 0;
};

}  // namespace

void scale_queries(const AttentionTask& task, Heads q, int64_t head_dim, float scale, float* scaled) {
  for (int64_t r = 0; r < task.rows(); ++r) {
    const float* row = q.data + (task.first_query + r / task.heads) * q.token_stride +
                       (task.first_head + r % task.heads) * q.head_stride;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store(scaled + r * head_dim + d, _mm256_mul_ps(load(row + d), splat(scale)));
    }
  }
}

void softmax_row(float* scores, int64_t hidden, int64_t count, const AttentionOptions& options, SoftmaxRow row,
                 int64_t width) {
  if (options.has_soft_cap) {
    const Vec cap = splat(options.soft_cap), inverse = splat(1.0f / options.soft_cap);
    for (int64_t j = 0; j < count; j += kLanes) {
      store(scores + j, _mm256_mul_ps(cap, tanh(_mm256_mul_ps(load(scores + j), inverse))));
    }
  }
  std::fill(scores, scores + hidden, -INFINITY);
  for (int64_t j = count; j % kLanes != 0; ++j) scores[j] = -INFINITY;
  Vec highest = splat(*row.peak);
  for (int64_t j = 0; j < count; j += kLanes) highest = _mm256_max_ps(highest, load(scores + j));
  const float peak = max(highest);
  Vec sums = zero();
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec weight = exp(_mm256_sub_ps(load(scores + j), splat(peak)));
    store(scores + j, weight);
    sums = _mm256_add_ps(sums, weight);
  }
  if (peak != *row.peak) {
    const float scale = std::exp(*row.peak - peak);
    for (int64_t d = 0; d < width; d += kLanes) store(row.out + d, _mm256_mul_ps(load(row.out + d), splat(scale)));
    *row.total *= scale;
    *row.peak = peak;
  }
  *row.total += sum(sums);
}

void paged_attention(Heads q, const PagedKV& kv, const Sequences& sequences, const AttentionOptions& options,
                     float* out) {
  Attention(q, kv, sequences, options, out).run();
}

}  // namespace mlserve
