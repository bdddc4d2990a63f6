#include "pool.hpp"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <unistd.h>

namespace blockmean {
namespace {

struct Pool {
    const pid_t owner = getpid();
    std::mutex in_use;  // held by the caller whose work is being done
    std::mutex mutex;   // guards what follows, but for `next`
    std::condition_variable wake, done;
    int threads = 0, wanted = 0, busy = 0;
    uint64_t round = 0;
    Job job = nullptr;
    void* context = nullptr;
    int64_t tasks = 0;
    std::atomic<int64_t> next{0};

    void work() {
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) job(context, task);
    }

    void wait_for_work(int number) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return round != seen && number < wanted; });
            seen = round;
            lock.unlock();
            work();
            lock.lock();
            if (--busy == 0) done.notify_one();
        }
    }

    void run(int64_t count, int helpers, Job function, void* argument) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            for (; threads < helpers; ++threads) {
                try {
                    std::thread(&Pool::wait_for_work, this, threads).detach();
                } catch (const std::exception&) {  // the system has no more threads: fewer do the same work
                    helpers = threads;
                    break;
                }
            }
            job = function, context = argument, tasks = count, next = 0;
            wanted = busy = helpers;
            ++round;
        }
        wake.notify_all();
        work();
        std::unique_lock<std::mutex> lock(mutex);
        done.wait(lock, [&] { return busy == 0; });
        wanted = 0;
    }
};

// Threads do not survive a fork, and locks stay as they were: a child leaves its parent's pool alone and makes its own.
// A pool is never deleted; its threads sleep until the process ends.
Pool* pool() {
    static std::atomic<Pool*> current{nullptr};
    Pool* found = current.load(std::memory_order_acquire);
    if (found && found->owner == getpid()) return found;
    Pool* made = new Pool;
    if (current.compare_exchange_strong(found, made)) return made;
    delete made;
    return found;
}

}  // namespace

void parallel(int64_t tasks, int threads, Job job, void* context) {
    if (threads > tasks) threads = int(tasks);
    if (threads > 1) {
        Pool* shared = pool();
        std::unique_lock<std::mutex> lock(shared->in_use, std::try_to_lock);
        if (lock.owns_lock()) return shared->run(tasks, threads - 1, job, context);
    }
    for (int64_t task = 0; task < tasks; ++task) job(context, task);  // or another thread is using the pool
}

}  // namespace blockmean
