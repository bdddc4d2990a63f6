// The functions that Python calls through ctypes: they split lists of tensors into tasks, and choose the instructions.
//
// Nothing here knows Python or torch. Memory comes as addresses, whose owners the caller keeps alive; __init__.py and
// anova.py have checked them. ctypes releases the GIL during every call.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "anova.hpp"
#include "passes.hpp"

using namespace blockmean;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t CHUNK = 1 << 14;     // entries of a task: its vectors fit into the cache of a core
constexpr int64_t STRIPE = 1 << 10;    // entries of a row that a task takes where blocks are columns
constexpr int64_t GRAIN = 1 << 17;     // entries for which it pays to start another thread
constexpr int64_t PRODUCTS = 1 << 15;  // the same for Anova

// ------------------------------------------------------------------ instruction sets

struct Variant {
    const Kernels* kernels;
    const AnovaKernels* anova;
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
        found.push_back({&kernels_avx512, &anova_avx512, avx512});
        found.push_back({&kernels_avx2, &anova_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")});
#endif
        found.push_back({&kernels_plain, &anova_plain, true});
        return found;
    }();
    return all;
}

std::atomic<const Variant*> chosen{nullptr};

// ------------------------------------------------------------------ threads

// f(task, thread) for every task, on at most `threads` threads with this one. Chance decides which thread takes a task, so
// a task writes only what no other one reads. Threads end with the call, so a fork finds none. Not OpenMP: torch brings a
// runtime of its own, and two of them fight over the cores.
template <class F> void parallel(int64_t tasks, int64_t threads, F f) {
    std::atomic<int64_t> next{0};
    const auto work = [&](int64_t thread) {
        for (int64_t task; (task = next++) < tasks;) f(task, thread);
    };
    std::vector<std::thread> others;
    try {
        for (int64_t i = 1; i < std::min(threads, tasks); ++i) others.emplace_back(work, i);
    } catch (const std::exception&) {  // the system has no more: fewer do the same work
    }
    work(0);
    for (std::thread& other : others) other.join();
}

// ------------------------------------------------------------------ lists of tensors with blocks

// Tensors in tasks.
struct List {
    std::vector<Tensor> tensors;
    std::vector<Task> tasks;
    std::vector<double> partial;  // sums over parts of large blocks, (parts, MOST_ROWS)
    int64_t blocks = 0, entries = 0;

    List(const int64_t* columns, int64_t count, double* sums, int64_t stride) {
        const auto address = [&](int column, int64_t i) { return reinterpret_cast<char*>(columns[column * count + i]); };
        const Shape* shapes = reinterpret_cast<const Shape*>(columns + 4 * count);
        tensors.reserve(size_t(count));
        for (int64_t i = 0; i < count; ++i) {
            tensors.push_back({shapes[i], address(0, i), address(1, i), address(2, i), address(3, i)});
            split(tensors.back(), sums, stride);
        }
        partial.resize(size_t(std::count_if(tasks.begin(), tasks.end(), is_part)) * MOST_ROWS);
        double* next = partial.data();
        for (Task& task : tasks)
            if (is_part(task)) task.out = next, task.stride = 1, next += MOST_ROWS;
    }

    static bool is_part(const Task& task) { return task.tensor->outer == 1 && task.tensor->inner > CHUNK; }

    void split(const Tensor& tensor, double* sums, int64_t stride) {
        const int64_t row = tensor.blocks * tensor.inner, wanted = tensor.outer == 1 ? CHUNK : STRIPE;
        const int64_t width = wanted > tensor.inner ? wanted / tensor.inner * tensor.inner : tensor.inner;
        for (int64_t begin = 0, end; begin < row; begin = end) {
            end = std::min(begin + width, row);
            if (tensor.outer == 1 && tensor.inner > CHUNK)  // no task has entries of two large blocks
                end = begin + std::min(tensor.inner - begin % tensor.inner, CHUNK);
            tasks.push_back({&tensor, begin, end, blocks, sums ? sums + blocks + begin / tensor.inner : nullptr, stride});
        }
        blocks += tensor.blocks;
        entries += tensor.outer * row;
    }

    // Pass 2 takes tasks backwards: what the first pass read last is still in the cache.
    template <class F> void run(int threads, bool backwards, F f) const {
        const int64_t count = int64_t(tasks.size());
        parallel(count, std::min<int64_t>(threads, 1 + entries / GRAIN), [&](int64_t i, int64_t) {
            f(*chosen.load()->kernels, tasks[size_t(backwards ? count - 1 - i : i)]);
        });
    }
};

// ------------------------------------------------------------------ matrices of Anova

// Hands out an array after another; without memory, it only counts.
struct Ruler {
    float* base;
    int64_t used = 0;

    template <class A> void take(A*& out, int64_t entries) {
        out = base ? reinterpret_cast<A*>(base + used) : nullptr;
        used += padded(entries * int64_t(sizeof(A) / sizeof(float)));
    }
};

// Give a matrix memory that lasts for a call; returns how much it takes.
int64_t place(Matrix& m, float* at) {
    const int64_t k = padded(m.k), q = padded(m.q), rank = m.q + m.k, wide = m.panels() * PANEL;
    Ruler ruler{at};
    ruler.take(m.packed_U, m.units * k), ruler.take(m.packed_V, m.inputs * q);
    ruler.take(m.parts, m.chunks() > 1 ? m.chunks() * wide * m.k : 0);
    if (m.chunks() == 1) m.parts = m.UG;
    ruler.take(m.left, m.units * rank), ruler.take(m.right, wide * rank), ruler.take(m.scale, m.units);
    for (float** one : {&m.K, &m.mixed, &m.spare}) ruler.take(*one, m.k * q);
    ruler.take(m.KT, m.q * k), ruler.take(m.LL, m.k * k);
    ruler.take(m.squares_R, m.q), ruler.take(m.inverse_R, m.q), ruler.take(m.inverse_L, m.k);
    ruler.take(m.squares_E, m.units), ruler.take(m.block, BLOCK * std::max(k, q));
    m.of_units = {m.U(), m.X(), m.units, m.k, m.unit_stride(), 1, m.packed_U};
    m.of_inputs = {m.VT(), m.YT(), m.inputs, m.q, 1, m.inputs, m.packed_V};
    for (Side* side : {&m.of_units, &m.of_inputs}) {
        if (!*m.refresh) break;
        const int64_t w = padded(side->w);
        ruler.take(side->Z, side->length * w), ruler.take(side->gram, side->w * w), ruler.take(side->block, BLOCK * w);
        ruler.take(side->scale, w);
        for (float** one : {&side->turn, &side->kept}) ruler.take(*one, side->w * w);
    }
    return ruler.used;
}

// One call. Many matrices are taken one by one, each by one thread with all of its phases while it is in the cache: every
// thread has memory for one. Where a few large ones would keep some threads waiting, all threads take chunks of rows.
struct AnovaCall {
    std::vector<Matrix> matrices;
    float* scratch;
    int64_t threads, kept = 0, most = 0;  // floats that last from `read` to `write`, and those that the largest one needs
    bool one_by_one;

    AnovaCall(int64_t* columns, const double* bounds, int64_t count, float* scratch, int most_threads) : scratch(scratch) {
        int64_t entries = 0, largest = 0;
        matrices.reserve(size_t(count));
        for (int64_t i = 0; i < count; ++i) {
            const auto number = [&](int column) -> int64_t& { return columns[column * count + i]; };
            const auto floats = [&](int column) { return reinterpret_cast<float*>(number(column)); };
            Matrix m = {};
            m.param = reinterpret_cast<char*>(number(0)), m.grad = reinterpret_cast<char*>(number(1));
            m.M = floats(2), m.unit = floats(3), m.input = floats(4), m.grand = floats(5);
            m.units = number(6), m.inputs = number(7), m.k = number(8), m.q = number(9), m.dtype = Dtype(number(10));
            m.refresh = &number(11), m.bound_means = bounds[2 * i], m.bound_rest = bounds[2 * i + 1];
            Ruler ruler{scratch, kept};
            ruler.take(m.GV, m.units * padded(m.q)), ruler.take(m.UG, m.panels() * m.k * PANEL);
            ruler.take(m.rows, m.units), ruler.take(m.total, 3);
            kept = ruler.used;
            most = std::max(most, place(m, nullptr));
            entries += m.units * m.inputs, largest = std::max(largest, m.units * m.inputs);
            matrices.push_back(m);
        }
        threads = std::min<int64_t>(most_threads, 1 + entries / PRODUCTS);
        one_by_one = threads == 1 || largest * threads * 2 <= entries;
    }

    int64_t size() const { return kept + most * (one_by_one ? threads : int64_t(matrices.size())); }

    template <size_t N> void run(const Phase (&phases)[N], const AnovaRule& rule) {
        if (one_by_one) {
            parallel(int64_t(matrices.size()), threads, [&](int64_t i, int64_t thread) {
                Matrix& m = matrices[size_t(i)];
                place(m, scratch + kept + thread * most);
                for (const Phase& phase : phases)
                    for (int64_t begin = 0; begin < m.units; begin += phase.rows(m)) phase.take(m, rule, begin);
            });
            return;
        }
        for (size_t i = 0; i < matrices.size(); ++i) place(matrices[i], scratch + kept + int64_t(i) * most);
        for (const Phase& phase : phases) {
            std::vector<std::pair<const Matrix*, int64_t>> tasks;
            for (const Matrix& m : matrices)
                for (int64_t begin = 0; begin < m.units; begin += phase.rows(m)) tasks.push_back({&m, begin});
            parallel(int64_t(tasks.size()), threads, [&](int64_t i, int64_t) {
                phase.take(*tasks[size_t(i)].first, rule, tasks[size_t(i)].second);
            });
        }
    }
};

}  // namespace

// ------------------------------------------------------------------ functions

// The instruction set in use; another one if `wanted` is not null. Null if this processor does not have it.
EXPORT const char* blockmean_instructions(const char* wanted) {
    for (const Variant& one : variants()) {
        if (!one.can_run || (wanted && std::strcmp(wanted, one.kernels->name))) continue;
        if (wanted || !chosen) chosen = &one;
        return chosen.load()->kernels->name;
    }
    return nullptr;
}

// Of the structs here: a library from before they changed is not the one that Python was written for.
EXPORT int blockmean_sizes() { return int(sizeof(Rule) << 8 | sizeof(AnovaRule)); }

// Lists of tensors are columns of `count` numbers, one after the other: the addresses of parameters, gradients, first
// moments (0 for AdaGrad) and second moments; then come their shapes.
//
// Pass 1: rule.sums of every block of all tensors, row k at out[k * stride]. Returns whether all of them are finite, and
// the squares of row 0, which U will hold.
EXPORT int blockmean_sums(const int64_t* columns, int64_t count, const Rule* rule, int threads, double* out,
                          int64_t stride) noexcept {
    const List list(columns, count, out, stride);
    list.run(threads, false, [&](const Kernels& kernels, const Task& task) { kernels.sums(*rule, task); });
    const int rows = ROWS[rule->sums];
    for (const Task& task : list.tasks) {  // in order, whoever computed them
        if (!List::is_part(task)) continue;
        double* at = out + task.block + task.begin / task.tensor->inner;
        const bool first = task.begin % task.tensor->inner == 0;
        for (int k = 0; k < rows; ++k) at[k * stride] = first ? task.out[k] : at[k * stride] + task.out[k];
    }
    bool finite = true;
    for (int k = 0; k < rows; ++k)
        for (int64_t j = 0; j < list.blocks; ++j) finite &= std::isfinite(out[k * stride + j]);
    for (int64_t j = 0; j < list.blocks; ++j) finite &= std::isfinite(out[j] * out[j]);
    return finite;
}

// Pass 2: update moments and parameters. c and kappa have a number for every block; null stands for c = 0 and κ = 1.
EXPORT void blockmean_apply(const int64_t* columns, int64_t count, const Rule* rule, int threads, const double* c,
                            const double* kappa) noexcept {
    const List list(columns, count, nullptr, 0);
    list.run(threads, true, [&](const Kernels& kernels, const Task& task) {
        kernels.apply(*rule, task, c ? c + task.block : nullptr, kappa ? kappa + task.block : nullptr);
    });
}

// Solve and update, each block for itself. `out` has the SQUARES of the same list in rows 0 and 1; rows 2 and 3 become
// the length of the uncorrected step along what a block shares, and its change. `states` are the addresses of every
// tensor's U, then of its energy.
EXPORT void blockmean_solve_and_apply(const int64_t* columns, int64_t count, const Rule* rule, int threads,
                                      double* const* states, double* out, int64_t stride) noexcept {
    const List list(columns, count, out, stride);
    list.run(threads, true, [&](const Kernels& kernels, const Task& task) {
        const int64_t i = task.tensor - list.tensors.data();
        kernels.by_block(*rule, task, states[i], states[count + i]);
    });
}

// Lists of matrices are columns as well: the addresses of parameters, gradients, exp_avg, unit_means, input_means and
// grand_means; units, inputs, k, q, dtype, and `refresh`: 1 if one is due. `bounds` has two numbers per matrix.
//
// How many floats `read` and `write` need, aligned to 64 bytes; what is in them must last from one to the other.
EXPORT int64_t blockmean_anova_scratch(int64_t* columns, const double* bounds, int64_t count, int threads) noexcept {
    return AnovaCall(columns, bounds, count, nullptr, threads).size();
}

// Pass 1. Returns whether all gradients are finite; nothing is changed.
EXPORT int blockmean_anova_read(int64_t* columns, const double* bounds, int64_t count, int threads, const AnovaRule* rule,
                                float* scratch) noexcept {
    AnovaCall call(columns, bounds, count, scratch, threads);
    call.run(chosen.load()->anova->read, *rule);
    return std::all_of(call.matrices.begin(), call.matrices.end(), [](const Matrix& m) {
        return std::isfinite(m.total[0]);
    });
}

// The rest of a step, after `read` with the same list, scratch and threads. Refreshes what is due, but for matrices where
// a column of U or V is zero: their `refresh` becomes −1.
EXPORT void blockmean_anova_write(int64_t* columns, const double* bounds, int64_t count, int threads,
                                  const AnovaRule* rule, float* scratch) noexcept {
    AnovaCall call(columns, bounds, count, scratch, threads);
    call.run(chosen.load()->anova->write, *rule);
}
