// Loops over torch's own thread pool.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace mlserve {

inline int64_t max_threads() { return omp_get_max_threads(); }

// Runs task(0) .. task(count - 1), each once, in any order; serially unless `worth_it`: waking the pool costs a few
// microseconds. Tasks are handed out one by one, so that a thread that another process holds up doesn't hold up the rest.
template <class Task>
inline void parallel_for(int64_t count, bool worth_it, const Task& task) {
  if (count <= 1 || !worth_it) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) task(i);
}

// The same for tasks whose memory follows on that of the task before, which may fetch its beginning: each thread has a
// run of them, in order, and takes part in others' when it has none left.
template <class Task>
inline void parallel_runs(int64_t count, bool worth_it, const Task& task) {
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t num_runs = worth_it ? std::min(max_threads(), count) : 1;
  if (num_runs <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  const std::unique_ptr<Run[]> runs(new Run[num_runs]);
  for (int64_t r = 0; r < num_runs; ++r) {
    runs[r].next = count * r / num_runs;
    runs[r].end = count * (r + 1) / num_runs;
  }
#pragma omp parallel
  {
    const int64_t own = omp_get_thread_num();
    for (int64_t r = 0; r < num_runs; ++r) {
      Run& run = runs[(own + r) % num_runs];
      int64_t i;
      while ((i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end) task(i);
    }
  }
}

}  // namespace mlserve
