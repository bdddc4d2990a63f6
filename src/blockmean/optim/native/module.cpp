// The Python module: tables of addresses, the split into tasks, and the kernels of the best instruction set.
//
// Nothing here knows torch. Memory comes as addresses, whose owners the caller keeps alive; native/__init__.py has
// checked them. The limited API makes one binary serve every Python from 3.11 on.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "anova.hpp"
#include "passes.hpp"
#include "pool.hpp"
#include "solve.hpp"
#include "watch.hpp"

using namespace blockmean;

namespace {

constexpr int64_t CHUNK = 1 << 14;   // entries of a task: its vectors fit into the cache of a core
constexpr int64_t STRIPE = 1 << 10;  // entries of a row that a task takes where blocks are columns
constexpr int64_t GRAIN = 1 << 15;   // entries for which it pays to wake another thread

// What was compiled for one instruction set, and whether this processor has it.
struct Compiled {
    const Kernels& passes;
    const AnovaKernels& anova;
    TimesRoot times_root;
    bool can_run;
};

// From the best to the plain one, which runs everywhere.
const std::vector<Compiled>& variants() {
    static const std::vector<Compiled> all = [] {
        std::vector<Compiled> found;
#if defined(__x86_64__)
        __builtin_cpu_init();
#if defined(STAND_IN)  // tests/support/avx512.h
        const bool avx512 = true;
#else
        const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
        // Every processor with AVX2 and FMA converts half precision as well.
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        found.push_back({kernels_avx512, anova_avx512, times_root_avx512, avx512});
        found.push_back({kernels_avx2, anova_avx2, times_root_avx2, avx2});
#endif
        found.push_back({kernels_plain, anova_plain, times_root_plain, true});
        return found;
    }();
    return all;
}

// The variant that the environment asks for, else the best one; null if the processor lacks what it asks for.
const Compiled* chosen() {
    const char* wanted = std::getenv("BLOCKMEAN_INSTRUCTIONS");
    for (const Compiled& one : variants())
        if (one.can_run && (!wanted || !*wanted || !std::strcmp(wanted, one.passes.name))) return &one;
    return nullptr;
}

const Compiled& compiled() {
    static const Compiled& one = *chosen();  // loading the module has made sure that there is one
    return one;
}

// The tensors of a list, what a thread may take of them at a time, and room for the partial sums of large blocks.
struct Table {
    std::vector<Piece> pieces;
    std::vector<Task> tasks;
    std::vector<double> partial;  // (parts, MOST_ROWS)
    int64_t blocks = 0, entries = 0;
    bool local = false;  // whether the next update sums, solves and applies block by block

    void add(Piece piece) {
        const int64_t row = piece.blocks * piece.inner, index = int64_t(pieces.size());
        const int64_t bytes = piece.inner * (piece.dtype == FLOAT64 ? 8 : 4);
        piece.is_local = piece.outer == 1 && piece.inner > 1 && bytes <= LOCAL_BYTES;
        piece.block = blocks;
        blocks += piece.blocks;
        entries += piece.outer * row;
        pieces.push_back(piece);
        if (piece.outer == 1 && piece.inner > CHUNK) {  // blocks in parts
            for (int64_t block = 0; block < piece.blocks; ++block) {
                const int64_t parts = (piece.inner + CHUNK - 1) / CHUNK, first = block * piece.inner;
                for (int64_t k = 0; k < parts; ++k) {
                    const int64_t end = k + 1 < parts ? (k + 1) * CHUNK : piece.inner;
                    tasks.push_back({index, first + k * CHUNK, first + end, int64_t(partial.size()) / MOST_ROWS});
                    partial.resize(partial.size() + MOST_ROWS);
                }
            }
            return;
        }
        const int64_t wanted = piece.outer == 1 ? CHUNK : STRIPE;
        const int64_t width = wanted > piece.inner ? wanted / piece.inner * piece.inner : piece.inner;
        for (int64_t begin = 0; begin < row; begin += width)
            tasks.push_back({index, begin, begin + width < row ? begin + width : row, -1});
    }

    // Tasks are taken in groups of so many that are far apart in memory.
    int64_t groups() const { return (int64_t(tasks.size()) + STREAMS - 1) / STREAMS; }

    int threads(int wanted) const {
        const int64_t most = 1 + entries / GRAIN;
        return wanted < most ? wanted : int(most);
    }
};

struct Call {
    const Kernels& run;
    Rule rule;
    Table& table;
    double* sums;
    int64_t stride;
    const double *c, *kappa;
    Solver* solver = nullptr;  // what follows is for steps that solve block by block
    const Form* form = nullptr;
    const Vectors* vectors = nullptr;
    std::atomic<bool> failed{false};
};

// Where the sums of a task go.
double* place(const Call& call, const Piece& piece, const Task& task) {
    if (task.part >= 0) return call.table.partial.data() + task.part * MOST_ROWS;
    return call.sums + piece.block + task.begin / piece.inner;
}

// Some tasks that are far apart in memory, together if they can be.
void sum_tasks(void* context, int64_t number) {
    Call& call = *static_cast<Call*>(context);
    const Table& table = call.table;
    const int64_t count = int64_t(table.tasks.size()), apart = table.groups();
    const Piece* pieces[STREAMS];
    const Task* tasks[STREAMS];
    double* out[STREAMS];
    Rule rules[STREAMS];
    int found = 0;
    bool together = true;
    for (int64_t one = number; one < count; one += apart, ++found) {
        const Task& task = *(tasks[found] = &table.tasks[size_t(one)]);
        const Piece& piece = *(pieces[found] = &table.pieces[size_t(task.piece)]);
        out[found] = place(call, piece, task);
        rules[found] = call.rule;
        if (table.local && piece.is_local) rules[found].sums = SQUARES;
        const Sums sums = rules[found].sums;
        together &= (sums == SQUARES || sums == PAPER || sums == CONSISTENT) && sums == rules[0].sums;
        together &= piece.outer == 1 && piece.inner > 1 && piece.dtype == pieces[0]->dtype;
        together &= (task.part >= 0) == (tasks[0]->part >= 0);
    }
    const auto stride = [&](const Task& task) { return task.part >= 0 ? 1 : call.stride; };
    if (together && found == STREAMS) return call.run.streams(rules[0], pieces, tasks, out, stride(*tasks[0]));
    for (int s = 0; s < found; ++s) call.run.sums(rules[s], *pieces[s], *tasks[s], out[s], stride(*tasks[s]));
}

void apply_task(Call& call, const Task& task) {
    const Piece& piece = call.table.pieces[size_t(task.piece)];
    const double* c = call.c ? call.c + piece.block : nullptr;
    const double* kappa = call.kappa ? call.kappa + piece.block : nullptr;
    if (!call.table.local || !piece.is_local) return call.run.apply(call.rule, piece, task, c, kappa);
    const Rows& rows = call.solver->rows[size_t(task.piece)];
    const int64_t begin = task.begin / piece.inner, end = task.end / piece.inner;
    prepare(*call.solver, *call.form, *call.vectors, rows, begin, end);
    const double* factor = call.solver->scale.data() + rows.block;
    if (!call.run.local(call.rule, piece, task, call.sums + piece.block, call.stride, factor, kappa)) call.failed = true;
    conclude(*call.solver, *call.vectors, rows, begin, end);
}

// The groups of `sum_tasks`, backwards: what the first pass read last is still in the cache.
void apply_tasks(void* context, int64_t number) {
    Call& call = *static_cast<Call*>(context);
    const int64_t count = int64_t(call.table.tasks.size()), apart = call.table.groups();
    for (int64_t one = apart - 1 - number; one < count; one += apart) apply_task(call, call.table.tasks[size_t(one)]);
}

// Add up the partial sums of large blocks in order, whoever computed them. Return whether all is finite, and the
// squares of the gradient's sums, which U will hold.
bool finish_sums(const Rule& rule, const Table& table, double* sums, int64_t stride) {
    const int rows = ROWS[rule.sums];
    for (const Task& task : table.tasks) {
        if (task.part < 0) continue;
        const Piece& piece = table.pieces[task.piece];
        double* out = sums + piece.block + task.begin / piece.inner;
        const double* part = table.partial.data() + task.part * MOST_ROWS;
        const bool first = task.begin % piece.inner == 0;
        for (int k = 0; k < rows; ++k) out[k * stride] = first ? part[k] : out[k * stride] + part[k];
    }
    bool finite = true;
    for (int k = 0; k < rows; ++k)
        for (int64_t j = 0; j < table.blocks; ++j) finite &= std::isfinite(sums[k * stride + j]);
    for (int64_t j = 0; j < table.blocks; ++j) finite &= std::isfinite(sums[j] * sums[j]);
    return finite;
}

// Whether no sum of a block that is to be solved in its turn can overflow: those of squares bound all others, since
// averages of squares, or their sums, are at most the last ones plus the new squares.
bool cannot_overflow(const Table& table, const double* sums, int64_t stride) {
    for (const Piece& piece : table.pieces) {
        const double limit = piece.dtype == FLOAT64 ? 0x1p1020 : 0x1p124;
        for (int64_t j = piece.block; piece.is_local && j < piece.block + piece.blocks; ++j)
            if (!(sums[stride + j] + sums[2 * stride + j] < limit)) return false;
    }
    return true;
}

// ------------------------------------------------------------------ arguments

template <class T> T* address(long long x) { return reinterpret_cast<T*>(intptr_t(x)); }

bool read_ints(PyObject* list, std::vector<int64_t>& out) {
    const Py_ssize_t count = PyList_Size(list);
    if (count < 0) return false;
    out.resize(size_t(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        out[size_t(i)] = PyLong_AsLongLong(PyList_GetItem(list, i));
        if (out[size_t(i)] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

template <class T> void destroy(PyObject* capsule) {
    delete static_cast<T*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
}

template <class T> PyObject* owned(std::unique_ptr<T> thing, const char* name) {
    PyObject* capsule = PyCapsule_New(thing.get(), name, destroy<T>);
    if (capsule) thing.release();
    return capsule;
}

// (sums, adam, careful, β₁, β₂, ε, weight decay, sign, η, decay of η)
bool read_rule(PyObject* tuple, Rule& rule, double& lr, double& lr_decay) {
    int sums, adam, careful;
    if (!PyArg_ParseTuple(tuple, "iiiddddddd", &sums, &adam, &careful, &rule.beta1, &rule.beta2, &rule.eps,
                          &rule.weight_decay, &rule.sign, &lr, &lr_decay))
        return false;
    rule.sums = Sums(sums), rule.adam = adam, rule.careful = careful;
    return true;
}

// What changes with every step: addresses of gradients, and step counts with all that follows from them.
bool read_step(Table& table, const Rule& rule, double lr, double lr_decay, PyObject* grads, PyObject* steps) {
    const size_t count = table.pieces.size();
    if (size_t(PyList_Size(grads)) != count || size_t(PyList_Size(steps)) != count) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the table has another number of tensors");
        return false;
    }
    double last = -1, gain = 1, gain_r = 1;
    for (size_t i = 0; i < count; ++i) {
        const long long at = PyLong_AsLongLong(PyList_GetItem(grads, Py_ssize_t(i)));
        const double step = PyFloat_AsDouble(PyList_GetItem(steps, Py_ssize_t(i)));
        if (PyErr_Occurred()) return false;
        if (rule.adam && step != last) {
            last = step;
            gain = step ? 1 / (1 - std::pow(rule.beta1, step)) : 1;
            gain_r = step ? 1 / (1 - std::pow(rule.beta2, step)) : 1;
        }
        Piece& piece = table.pieces[i];
        piece.grad = address<char>(at);
        piece.gain = gain, piece.gain_r = gain_r;
        piece.rate = lr / (1 + (step - 1) * lr_decay);
    }
    return true;
}

// (weighted, raw, keeps diagonal, keeps trace, β, floor, smallest λ, cap)
bool read_form(PyObject* tuple, Form& form) {
    int weighted, raw, diagonal, trace;
    if (!PyArg_ParseTuple(tuple, "iiiidddd", &weighted, &raw, &diagonal, &trace, &form.beta, &form.floor,
                          &form.smallest_lambda, &form.cap))
        return false;
    form.weighted = weighted, form.raw = raw, form.keeps_diagonal = diagonal, form.keeps_trace = trace;
    return true;
}

// (sums, stride, common, change, c, kappa)
bool read_vectors(PyObject* tuple, Vectors& x) {
    long long sums, stride, common, change, c, kappa;
    if (!PyArg_ParseTuple(tuple, "LLLLLL", &sums, &stride, &common, &change, &c, &kappa)) return false;
    x = {address<double>(sums),   int64_t(stride),    address<double>(common),
         address<double>(change), address<double>(c), address<double>(kappa)};
    return true;
}

// ------------------------------------------------------------------ functions

// table([param, first, second, outer, blocks, inner, dtype, …]) → capsule
PyObject* make_table(PyObject*, PyObject* list) try {
    std::vector<int64_t> x;
    if (!read_ints(list, x)) return nullptr;
    auto table = std::make_unique<Table>();
    for (size_t i = 0; i + 7 <= x.size(); i += 7)
        table->add({address<char>(x[i]), address<char>(x[i + 1]), address<char>(x[i + 2]), x[i + 3], x[i + 4], x[i + 5],
                    Dtype(x[i + 6]), 0, false, nullptr, 1, 1, 0});
    return owned(std::move(table), "blockmean.table");
} catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
}

// block_sums(table, rule, grads, steps, out, stride, local, threads) → whether all sums are finite, and whether blocks
// are to be solved one by one in the update. That takes `local`, and `out` as the last step left it.
PyObject* block_sums(PyObject*, PyObject* args) {
    PyObject *capsule, *tuple, *grads, *steps;
    long long out, stride;
    int local, threads;
    if (!PyArg_ParseTuple(args, "OOOOLLpi", &capsule, &tuple, &grads, &steps, &out, &stride, &local, &threads))
        return nullptr;
    auto* table = static_cast<Table*>(PyCapsule_GetPointer(capsule, "blockmean.table"));
    Rule rule;
    double lr, decay;
    if (!table || !read_rule(tuple, rule, lr, decay) || !read_step(*table, rule, lr, decay, grads, steps)) return nullptr;
    bool finite;
    Py_BEGIN_ALLOW_THREADS
    Call call{compiled().passes, rule, *table, address<double>(out), int64_t(stride), nullptr, nullptr};
    table->local = local;
    for (;;) {
        parallel(table->groups(), table->threads(threads), sum_tasks, &call);
        finite = finish_sums(rule, *table, call.sums, call.stride);
        if (!finite || !table->local || cannot_overflow(*table, call.sums, call.stride)) break;
        table->local = false;  // then nothing is written before all sums are known
    }
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(OO)", finite ? Py_True : Py_False, table->local ? Py_True : Py_False);
}

// apply_(table, rule, grads, steps, c, kappa, threads)
PyObject* apply_(PyObject*, PyObject* args) {
    PyObject *capsule, *tuple, *grads, *steps;
    long long c, kappa;
    int threads;
    if (!PyArg_ParseTuple(args, "OOOOLLi", &capsule, &tuple, &grads, &steps, &c, &kappa, &threads)) return nullptr;
    auto* table = static_cast<Table*>(PyCapsule_GetPointer(capsule, "blockmean.table"));
    Rule rule;
    double lr, decay;
    if (!table || !read_rule(tuple, rule, lr, decay) || !read_step(*table, rule, lr, decay, grads, steps)) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    table->local = false;
    Call call{compiled().passes, rule, *table, nullptr, 0, address<double>(c), address<double>(kappa)};
    parallel(table->groups(), table->threads(threads), apply_tasks, &call);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

// solve_and_apply_(table, rule, solver, form, vectors, threads): the update and all that comes before it, block by
// block, after a block_sums that has allowed it and with its gradients → whether all sums were finite; the parameters of
// blocks with others stay as they are
PyObject* solve_and_apply(PyObject*, PyObject* args) {
    PyObject *first, *second, *tuple, *options, *addresses;
    int threads;
    if (!PyArg_ParseTuple(args, "OOOOOi", &first, &tuple, &second, &options, &addresses, &threads)) return nullptr;
    auto* table = static_cast<Table*>(PyCapsule_GetPointer(first, "blockmean.table"));
    auto* solver = static_cast<Solver*>(PyCapsule_GetPointer(second, "blockmean.solver"));
    Rule rule;
    Form form;
    Vectors vectors;
    double lr, decay;
    if (!table || !solver || !read_rule(tuple, rule, lr, decay) || !read_form(options, form) ||
        !read_vectors(addresses, vectors))
        return nullptr;
    if (!table->local || table->pieces.size() != solver->rows.size()) {
        PyErr_SetString(PyExc_ValueError, "the blocks of this table are not to be solved one by one");
        return nullptr;
    }
    bool good;
    Py_BEGIN_ALLOW_THREADS
    Call call{compiled().passes, rule, *table, const_cast<double*>(vectors.sums), vectors.stride, vectors.c,
              vectors.kappa, solver, &form, &vectors};
    for (size_t i = 0; i < table->pieces.size(); ++i) {
        if (table->pieces[i].is_local) continue;
        prepare(*solver, form, vectors, solver->rows[i], 0, table->pieces[i].blocks);
        conclude(*solver, vectors, solver->rows[i], 0, table->pieces[i].blocks);
    }
    parallel(table->groups(), table->threads(threads), apply_tasks, &call);
    table->local = false;
    good = !call.failed;
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(good);
}

// solver(blocks, [U, energy, count, width, block, column, origin, size, …]) → capsule
PyObject* make_solver(PyObject*, PyObject* args) try {
    long long blocks;
    PyObject* list;
    std::vector<int64_t> x;
    if (!PyArg_ParseTuple(args, "LO", &blocks, &list) || !read_ints(list, x)) return nullptr;
    auto solver = std::make_unique<Solver>();
    solver->scale.resize(size_t(blocks)), solver->own.resize(size_t(blocks));
    for (size_t i = 0; i + 8 <= x.size(); i += 8)
        solver->rows.push_back({address<double>(x[i]), address<double>(x[i + 1]), x[i + 2], x[i + 3], x[i + 4], x[i + 5],
                                x[i + 6], double(x[i + 7])});
    return owned(std::move(solver), "blockmean.solver");
} catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
}

// accumulate(solver, form, vectors, A)
PyObject* accumulate_(PyObject*, PyObject* args) {
    PyObject *capsule, *options, *addresses;
    long long A;
    if (!PyArg_ParseTuple(args, "OOOL", &capsule, &options, &addresses, &A)) return nullptr;
    auto* solver = static_cast<Solver*>(PyCapsule_GetPointer(capsule, "blockmean.solver"));
    Form form;
    Vectors vectors;
    if (!solver || !read_form(options, form) || !read_vectors(addresses, vectors)) return nullptr;
    accumulate(*solver, form, vectors, address<double>(A));
    Py_RETURN_NONE;
}

// correct(solver, form, vectors)
PyObject* correct_(PyObject*, PyObject* args) {
    PyObject *capsule, *options, *addresses;
    if (!PyArg_ParseTuple(args, "OOO", &capsule, &options, &addresses)) return nullptr;
    auto* solver = static_cast<Solver*>(PyCapsule_GetPointer(capsule, "blockmean.solver"));
    Form form;
    Vectors vectors;
    if (!solver || !read_form(options, form) || !read_vectors(addresses, vectors)) return nullptr;
    correct(*solver, form, vectors);
    Py_RETURN_NONE;
}

// times_root(solver, A, n, floor, b, out) → whether it could be computed
PyObject* times_root_(PyObject*, PyObject* args) try {
    PyObject* capsule;
    long long A, n, b, out;
    double floor;
    if (!PyArg_ParseTuple(args, "OLLdLL", &capsule, &A, &n, &floor, &b, &out)) return nullptr;
    auto* solver = static_cast<Solver*>(PyCapsule_GetPointer(capsule, "blockmean.solver"));
    if (!solver) return nullptr;
    solver->numbers.resize(size_t(n * n + 4 * n));
    solver->rotations.resize(size_t(rotations_for(n)));
    return PyBool_FromLong(compiled().times_root(address<double>(A), n, floor, address<double>(b), address<double>(out),
                                                 solver->numbers.data(), solver->rotations.data()));
} catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
}

// ------------------------------------------------------------------ Anova

struct Matrices {
    std::vector<Matrix> all;
    std::vector<Step> steps;     // the different ones of this step
    std::vector<int64_t> which;  // of them, for every matrix
    std::vector<char> to_do;     // 1 where U and V could not be turned here
    int64_t entries = 0;

    int threads(int wanted) const { return entries < GRAIN ? 1 : wanted; }
};

// matrices([param, units, inputs, means over units, over inputs, inner, dtype, twelve of state, …]) → capsule
PyObject* make_matrices(PyObject*, PyObject* list) try {
    std::vector<int64_t> x;
    if (!read_ints(list, x)) return nullptr;
    auto made = std::make_unique<Matrices>();
    for (size_t i = 0; i + 7 + STATES <= x.size(); i += 7 + STATES) {
        Matrix matrix{};
        matrix.param = address<char>(x[i]);
        matrix.units = x[i + 1], matrix.inputs = x[i + 2], matrix.unit_means = x[i + 3], matrix.input_means = x[i + 4];
        matrix.inner = x[i + 5], matrix.dtype = Dtype(x[i + 6]);
        for (int s = 0; s < STATES; ++s) matrix.state[s] = address<char>(x[i + 7 + size_t(s)]);
        made->entries += matrix.units * matrix.inputs;
        made->all.push_back(matrix);
    }
    made->to_do.resize(made->all.size());
    return owned(std::move(made), "blockmean.matrices");
} catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
}

// anova_sums(matrices, grads, out, threads): ‖G‖² of every matrix into out → whether all are finite
PyObject* anova_sums(PyObject*, PyObject* args) try {
    PyObject *capsule, *grads;
    int threads;
    long long out;
    if (!PyArg_ParseTuple(args, "OOLi", &capsule, &grads, &out, &threads)) return nullptr;
    auto* matrices = static_cast<Matrices*>(PyCapsule_GetPointer(capsule, "blockmean.matrices"));
    std::vector<int64_t> at;
    if (!matrices || !read_ints(grads, at)) return nullptr;
    if (at.size() != matrices->all.size()) {
        PyErr_SetString(PyExc_ValueError, "the table has another number of matrices");
        return nullptr;
    }
    for (size_t i = 0; i < at.size(); ++i) matrices->all[i].grad = address<char>(at[i]);
    bool finite = true;
    Py_BEGIN_ALLOW_THREADS
    const Job job = [](void* context, int64_t i) {
        compiled().anova.sums(static_cast<Matrices*>(context)->all[size_t(i)]);
    };
    parallel(int64_t(at.size()), matrices->threads(threads), job, matrices);
    for (size_t i = 0; i < at.size(); ++i) {
        address<double>(out)[i] = matrices->all[i].square;
        finite &= std::isfinite(matrices->all[i].square * matrices->all[i].square);
    }
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(finite);
} catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
}

// anova_apply_(matrices, squares, [step, …], which, threads) → numbers of the matrices that torch must turn.
// A step is (maximize, turns, β₁, β₂, mean β, rate, decay, unbias of means and of the rest, longest of both, ρ, ε, ν, smallest).
PyObject* anova_apply(PyObject*, PyObject* args) try {
    PyObject *capsule, *list, *which;
    long long squares;
    int threads;
    if (!PyArg_ParseTuple(args, "OLOOi", &capsule, &squares, &list, &which, &threads)) return nullptr;
    auto* matrices = static_cast<Matrices*>(PyCapsule_GetPointer(capsule, "blockmean.matrices"));
    if (!matrices || !read_ints(which, matrices->which)) return nullptr;
    matrices->steps.clear();
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
        Step step{};
        int maximize, turns;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "ppddddddddddddd", &maximize, &turns, &step.beta1, &step.beta2,
                              &step.mean_beta, &step.rate, &step.decay, &step.unbias_means, &step.unbias_rest,
                              &step.longest_means, &step.longest_rest, &step.forget, &step.eps, &step.noise,
                              &step.smallest))
            return nullptr;
        step.maximize = maximize, step.turns = turns;
        matrices->steps.push_back(step);
    }
    for (size_t i = 0; i < matrices->all.size(); ++i) matrices->all[i].square = address<double>(squares)[i];
    Py_BEGIN_ALLOW_THREADS
    const Job job = [](void* context, int64_t i) {
        auto& own = *static_cast<Matrices*>(context);
        const Matrix& matrix = own.all[size_t(i)];
        const Step& step = own.steps[size_t(own.which[size_t(i)])];
        compiled().anova.apply(matrix, step);
        own.to_do[size_t(i)] = step.turns && !compiled().anova.turn(matrix);
    };
    parallel(int64_t(matrices->all.size()), matrices->threads(threads), job, matrices);
    Py_END_ALLOW_THREADS
    PyObject* left = PyList_New(0);
    for (size_t i = 0; left && i < matrices->to_do.size(); ++i) {
        if (!matrices->to_do[i]) continue;
        PyObject* number = PyLong_FromSize_t(i);
        if (!number || PyList_Append(left, number)) Py_CLEAR(left);
        Py_XDECREF(number);
    }
    return left;
} catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
}

// ------------------------------------------------------------------ step counts

// read_steps([address, …]) → the counts there, float32 in memory
PyObject* read_steps(PyObject*, PyObject* list) {
    std::vector<int64_t> at;
    if (!read_ints(list, at)) return nullptr;
    PyObject* steps = PyList_New(Py_ssize_t(at.size()));
    for (size_t i = 0; steps && i < at.size(); ++i) {
        PyObject* count = PyLong_FromDouble(*address<float>(at[i]));
        if (!count) {  // NaN or infinite
            Py_DECREF(steps);
            return nullptr;
        }
        PyList_SetItem(steps, Py_ssize_t(i), count);
    }
    return steps;
}

// advance([address, …]): add one to every count
PyObject* advance(PyObject*, PyObject* list) {
    std::vector<int64_t> at;
    if (!read_ints(list, at)) return nullptr;
    for (int64_t x : at) *address<float>(x) += 1;
    Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"table", make_table, METH_O, nullptr},
    {"block_sums", block_sums, METH_VARARGS, nullptr},
    {"apply_", apply_, METH_VARARGS, nullptr},
    {"solve_and_apply_", solve_and_apply, METH_VARARGS, nullptr},
    {"solver", make_solver, METH_VARARGS, nullptr},
    {"accumulate", accumulate_, METH_VARARGS, nullptr},
    {"times_root", times_root_, METH_VARARGS, nullptr},
    {"correct", correct_, METH_VARARGS, nullptr},
    {"matrices", make_matrices, METH_O, nullptr},
    {"anova_sums", anova_sums, METH_VARARGS, nullptr},
    {"anova_apply_", anova_apply, METH_VARARGS, nullptr},
    {"read_steps", read_steps, METH_O, nullptr},
    {"advance", advance, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

int fill_module(PyObject* module) {
    if (!chosen()) {
        std::string names;
        for (const Compiled& one : variants())
            if (one.can_run) names += names.empty() ? one.passes.name : std::string(", ") + one.passes.name;
        PyErr_Format(PyExc_RuntimeError, "BLOCKMEAN_INSTRUCTIONS=%s is not among what this machine can run: %s.",
                     std::getenv("BLOCKMEAN_INSTRUCTIONS"), names.c_str());
        return -1;
    }
    if (PyModule_AddFunctions(module, blockmean_watch_methods)) return -1;
    return PyModule_AddStringConstant(module, "instructions", compiled().passes.name);
}

PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, reinterpret_cast<void*>(fill_module)}, {0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, 0, METHODS, SLOTS, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModuleDef_Init(&MODULE); }
