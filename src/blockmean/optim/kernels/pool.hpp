// A few threads that wait for work. Not OpenMP: torch brings a runtime of its own, and two of them fight over the cores.
#pragma once

#include <cstdint>

namespace blockmean {

typedef void (*Job)(void* context, int64_t task);

// Call job(context, task) for every task below `tasks`, on at most `threads` threads including this one. Which thread
// takes a task is left to chance, so a task must write only what no other one reads.
void parallel(int64_t tasks, int threads, Job job, void* context);

}  // namespace blockmean
