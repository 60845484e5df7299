// Loops over torch's own thread pool.
#pragma once

#include <omp.h>

#include <cstdint>

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

}  // namespace mlserve
