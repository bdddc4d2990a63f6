// The functions that Python calls through ctypes: they split lists of tensors into tasks, and choose the instructions.
//
// Nothing here knows Python or torch. Memory comes as addresses, whose owners the caller keeps alive; __init__.py has
// checked them. ctypes releases the GIL during every call.
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "passes.hpp"
#include "pool.hpp"

using namespace blockmean;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t CHUNK = 1 << 14;   // entries of a task: its vectors fit into the cache of a core
constexpr int64_t STRIPE = 1 << 10;  // entries of a row that a task takes where blocks are columns
constexpr int64_t GRAIN = 1 << 15;   // entries for which it pays to wake another thread
constexpr int NO_MEMORY = -1;

// ------------------------------------------------------------------ instruction sets

struct Variant {
    const Kernels* kernels;
    bool can_run;
};

// From the best to the plain one, which runs everywhere.
const std::vector<Variant>& variants() {
    static const std::vector<Variant> all = [] {
        std::vector<Variant> found;
#if defined(__x86_64__) && !defined(ONLY_PLAIN)
        __builtin_cpu_init();
#if defined(STAND_IN)  // tests/support/avx512.h
        const bool avx512 = true;
#else
        const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
        // Every processor with AVX2 and FMA converts half precision as well.
        found.push_back({&kernels_avx512, avx512});
        found.push_back({&kernels_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")});
#endif
        found.push_back({&kernels_plain, true});
        return found;
    }();
    return all;
}

std::atomic<const Kernels*> chosen{nullptr};

// ------------------------------------------------------------------ tasks

// One call: its tensors in tasks, which threads take one by one.
struct Call {
    const Kernels& kernels;
    const Rule& rule;
    const double *c = nullptr, *kappa = nullptr;      // of all blocks
    double *const *U = nullptr, *const *energy = nullptr;  // of all tensors
    std::vector<Tensor> tensors;
    std::vector<Task> tasks;
    std::vector<double> partial;  // sums over parts of large blocks, (parts, MOST_ROWS)
    int64_t blocks = 0, entries = 0;

    Call(const Tensors& all, const Rule& rule, double* sums, int64_t stride) : kernels(*chosen), rule(rule) {
        tensors.reserve(size_t(all.count));
        for (int64_t i = 0; i < all.count; ++i) {
            tensors.push_back({all.shape[i], all.param[i], all.grad[i], all.first ? all.first[i] : nullptr, all.second[i]});
            split(tensors.back(), sums, stride);
        }
        int64_t parts = 0;
        for (const Task& task : tasks) parts += is_part(task);
        partial.resize(size_t(parts * MOST_ROWS));
        double* next = partial.data();
        for (Task& task : tasks)
            if (is_part(task)) task.out = next, task.stride = 1, next += MOST_ROWS;
    }

    static bool is_part(const Task& task) { return task.tensor->outer == 1 && task.tensor->inner > CHUNK; }

    void split(const Tensor& tensor, double* sums, int64_t stride) {
        const int64_t row = tensor.blocks * tensor.inner, wanted = tensor.outer == 1 ? CHUNK : STRIPE;
        const int64_t width = wanted > tensor.inner ? wanted / tensor.inner * tensor.inner : tensor.inner;
        for (int64_t begin = 0, end; begin < row; begin = end) {
            end = begin + width < row ? begin + width : row;
            if (tensor.outer == 1 && tensor.inner > CHUNK) {  // no task has entries of two large blocks
                const int64_t rest = tensor.inner - begin % tensor.inner;
                end = begin + (rest < CHUNK ? rest : CHUNK);
            }
            tasks.push_back({&tensor, begin, end, blocks, sums ? sums + blocks + begin / tensor.inner : nullptr, stride});
        }
        blocks += tensor.blocks;
        entries += tensor.outer * row;
    }

    void run(Job job, int threads) {
        const int64_t most = 1 + entries / GRAIN;
        parallel(int64_t(tasks.size()), threads < most ? threads : int(most), job, this);
    }

    // Pass 2 takes tasks backwards: what the first pass read last is still in the cache.
    const Task& from_the_end(int64_t number) const { return tasks[tasks.size() - 1 - size_t(number)]; }
};

void sum_task(void* context, int64_t number) {
    const Call& call = *static_cast<const Call*>(context);
    call.kernels.sums(call.rule, call.tasks[size_t(number)]);
}

void apply_task(void* context, int64_t number) {
    const Call& call = *static_cast<const Call*>(context);
    const Task& task = call.from_the_end(number);
    call.kernels.apply(call.rule, task, call.c ? call.c + task.block : nullptr, call.kappa ? call.kappa + task.block : nullptr);
}

void solve_task(void* context, int64_t number) {
    const Call& call = *static_cast<const Call*>(context);
    const Task& task = call.from_the_end(number);
    const auto i = task.tensor - call.tensors.data();
    call.kernels.by_block(call.rule, task, call.U[i], call.energy[i]);
}

}  // namespace

// ------------------------------------------------------------------ functions

// The instruction set in use; another one if `wanted` is not null. Null if this processor does not have it.
EXPORT const char* blockmean_instructions(const char* wanted) {
    for (const Variant& one : variants()) {
        if (!one.can_run || (wanted && std::strcmp(wanted, one.kernels->name))) continue;
        if (wanted || !chosen) chosen = one.kernels;
        return chosen.load()->name;
    }
    return nullptr;
}

// Of the structs here: a library from before they changed is not the one that __init__.py was written for.
EXPORT int64_t blockmean_sizes() { return int64_t(sizeof(Tensors) << 16 | sizeof(Rule)); }

// Pass 1: rule.sums of every block of all tensors, row k at out[k * stride]. Returns whether all of them are finite, and
// the squares of row 0, which U will hold; NO_MEMORY if there is none for the tasks.
EXPORT int blockmean_sums(const Tensors* tensors, const Rule* rule, double* out, int64_t stride, int threads) try {
    Call call(*tensors, *rule, out, stride);
    call.run(sum_task, threads);
    const int rows = ROWS[rule->sums];
    for (const Task& task : call.tasks) {  // in order, whoever computed them
        if (!Call::is_part(task)) continue;
        double* at = out + task.block + task.begin / task.tensor->inner;
        const bool first = task.begin % task.tensor->inner == 0;
        for (int k = 0; k < rows; ++k) at[k * stride] = first ? task.out[k] : at[k * stride] + task.out[k];
    }
    bool finite = true;
    for (int k = 0; k < rows; ++k)
        for (int64_t j = 0; j < call.blocks; ++j) finite &= std::isfinite(out[k * stride + j]);
    for (int64_t j = 0; j < call.blocks; ++j) finite &= std::isfinite(out[j] * out[j]);
    return finite;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// Pass 2: update moments and parameters. c and kappa have a number for every block; null stands for c = 0 and κ = 1.
EXPORT int blockmean_apply(const Tensors* tensors, const Rule* rule, const double* c, const double* kappa, int threads)
try {
    Call call(*tensors, *rule, nullptr, 0);
    call.c = c, call.kappa = kappa;
    call.run(apply_task, threads);
    return true;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// Solve and update, each block for itself. `out` has the SQUARES of the same list in rows 0 and 1; rows 2 and 3 become
// the length of the uncorrected step along what a block shares, and its change.
EXPORT int blockmean_solve_and_apply(const Tensors* tensors, const Rule* rule, double* const* U, double* const* energy,
                                     double* out, int64_t stride, int threads)
try {
    Call call(*tensors, *rule, out, stride);
    call.U = U, call.energy = energy;
    call.run(solve_task, threads);
    return true;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}
