// The functions that Python calls through ctypes: they split lists of tensors into tasks, and choose the instructions.
//
// Nothing here knows Python or torch. Memory comes as addresses, whose owners the caller keeps alive; __init__.py has
// checked them. ctypes releases the GIL during every call.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "anova.hpp"
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

    Call(const Tensors& all, const Rule& rule, double* sums, int64_t stride) : kernels(*chosen.load()->kernels), rule(rule) {
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

struct Step {
    Phase AnovaKernels::*phase;
    bool by_chunk, only_refresh;
};
constexpr Step READ[] = {{&AnovaKernels::pack, false, false},
                         {&AnovaKernels::project, true, false},
                         {&AnovaKernels::gather, false, false}};
constexpr Step WRITE[] = {{&AnovaKernels::precondition, false, false},   {&AnovaKernels::update, true, false},
                          {&AnovaKernels::orthonormalize, false, true}, {&AnovaKernels::project_average, true, true},
                          {&AnovaKernels::gather, false, true},         {&AnovaKernels::turn, false, true}};
constexpr int64_t PRODUCTS = 1 << 12;  // entries of a matrix for which it pays to wake another thread
constexpr int SLOTS = 64;

// One call. Many matrices are taken one by one, each by one thread with all of its steps while it is in the cache: a
// slot has memory for one. Where a few large ones would keep some threads waiting, all threads take chunks of rows.
struct AnovaCall {
    const AnovaKernels& kernels;
    const AnovaRule* rule;
    std::vector<Matrix> matrices;
    struct Chunk {
        const Matrix* matrix;
        int64_t begin, end;
    };
    std::vector<Chunk> chunks, wholes;
    const Step *step, *steps_end;
    int threads;
    bool one_by_one;
    int64_t kept = 0, slot = 0, size = 0;  // floats: of all matrices, of a slot, of both
    float* scratch;
    std::atomic<uint64_t> busy{0};  // a bit for every slot

    AnovaCall(const AnovaMatrices& all, const AnovaRule* rule, float* scratch, int most_threads)
        : kernels(*chosen.load()->anova), rule(rule), scratch(scratch) {
        int64_t entries = 0, largest = 0;
        matrices.reserve(size_t(all.count));
        for (int64_t i = 0; i < all.count; ++i) {
            Matrix m = {};
            m.param = all.param[i], m.grad = all.grad[i], m.M = all.exp_avg[i], m.unit = all.unit_means[i];
            m.input = all.input_means[i], m.grand = all.grand_means[i], m.units = all.units[i];
            m.inputs = all.inputs[i], m.k = all.k[i], m.q = all.q[i], m.dtype = Dtype(all.dtype[i]);
            m.refresh = all.refresh + i, m.bound_means = all.bound_means[i], m.bound_rest = all.bound_rest[i];
            Ruler ruler{scratch, kept};
            ruler.take(m.GV, m.units * padded(m.q)), ruler.take(m.UG, m.panels() * m.k * PANEL);
            ruler.take(m.rows, m.units), ruler.take(m.total, 3);
            kept = ruler.used;
            slot = std::max(slot, place(m, nullptr));
            const int64_t work = m.units * m.inputs;
            entries += work, largest = std::max(largest, work);
            matrices.push_back(m);
        }
        threads = int(std::min<int64_t>({most_threads, SLOTS, 1 + entries / PRODUCTS}));
        one_by_one = threads == 1 || largest * threads * 2 <= entries;
        size = kept + slot * (one_by_one ? threads : all.count);
    }

    // Give a matrix memory that lasts for a call; returns how much it takes.
    static int64_t place(Matrix& m, float* at) {
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
        m.of_units = {m.U(), m.X(), m.units, m.k, m.unit_stride(), 1};
        m.of_inputs = {m.VT(), m.YT(), m.inputs, m.q, 1, m.inputs};
        for (Side* side : {&m.of_units, &m.of_inputs}) {
            if (!*m.refresh) break;
            const int64_t w = padded(side->w), both = padded(2 * side->w);
            ruler.take(side->gram, 2 * side->w * both), ruler.take(side->scale, side->w);
            for (double** one : {&side->first, &side->second, &side->both}) ruler.take(*one, side->w * w);
            for (float** one : {&side->T, &side->turn, &side->kept}) ruler.take(*one, side->w * w);
            ruler.take(side->block, BLOCK * both), ruler.take(side->Z, side->length * w);
            side->narrow = side == &m.of_units ? m.packed_U : m.packed_V;
        }
        return ruler.used;
    }

    static bool concerns(const Step& step, const Matrix& m) { return !step.only_refresh || *m.refresh == 1; }

    void take(const Step& step, const Matrix& m, int64_t begin, int64_t end) const {
        if (concerns(step, m)) (kernels.*step.phase)(m, *rule, begin, end);
    }

    static void take_chunk(void* context, int64_t number) {
        const AnovaCall& call = *static_cast<const AnovaCall*>(context);
        const Chunk& chunk = (call.step->by_chunk ? call.chunks : call.wholes)[size_t(number)];
        call.take(*call.step, *chunk.matrix, chunk.begin, chunk.end);
    }

    static void take_matrix(void* context, int64_t number) {
        AnovaCall& call = *static_cast<AnovaCall*>(context);
        Matrix& m = call.matrices[size_t(number)];
        uint64_t taken = call.busy, bit;
        do bit = ~taken & (taken + 1);
        while (!call.busy.compare_exchange_weak(taken, taken | bit));
        place(m, call.scratch + call.kept + __builtin_ctzll(bit) * call.slot);
        for (const Step* step = call.step; step != call.steps_end; ++step)
            for (int64_t i = 0, rows = step->by_chunk ? m.chunk() : m.units; i < m.units; i += rows)
                call.take(*step, m, i, std::min(i + rows, m.units));
        call.busy &= ~bit;
    }

    template <size_t N> void run(const Step (&steps)[N]) {
        step = steps, steps_end = steps + N;
        if (one_by_one) return parallel(int64_t(matrices.size()), threads, take_matrix, this);
        float* at = scratch + kept;
        for (Matrix& m : matrices) {
            place(m, at), at += slot;
            wholes.push_back({&m, 0, m.units});
            for (int64_t i = 0; i < m.units; i += m.chunk()) chunks.push_back({&m, i, std::min(i + m.chunk(), m.units)});
        }
        for (; step != steps_end; ++step)
            parallel(int64_t((step->by_chunk ? chunks : wholes).size()), threads, take_chunk, this);
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

// ------------------------------------------------------------------ functions for Anova

EXPORT int64_t blockmean_anova_sizes() { return int64_t(sizeof(AnovaMatrices) << 16 | sizeof(AnovaRule)); }

// How many floats `read` and `write` need, aligned to 64 bytes; what is in them must last from one to the other.
EXPORT int64_t blockmean_anova_scratch(const AnovaMatrices* matrices, int threads) try {
    return AnovaCall(*matrices, nullptr, nullptr, threads).size;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// Pass 1. Returns whether all gradients are finite; nothing is changed.
EXPORT int blockmean_anova_read(const AnovaMatrices* matrices, const AnovaRule* rule, float* scratch, int threads) try {
    AnovaCall call(*matrices, rule, scratch, threads);
    call.run(READ);
    bool finite = true;
    for (const Matrix& m : call.matrices) finite &= bool(std::isfinite(m.total[0]));
    return finite;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// The rest of a step, after `read` with the same list, scratch and threads. Refreshes what is due, but for matrices where
// a column of U or V is zero: their refresh becomes −1.
EXPORT int blockmean_anova_write(const AnovaMatrices* matrices, const AnovaRule* rule, float* scratch, int threads) try {
    AnovaCall call(*matrices, rule, scratch, threads);
    call.run(WRITE);
    return true;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}
