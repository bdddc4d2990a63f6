#include "solve.hpp"

#include <cmath>

#include "passes.hpp"

namespace blockmean {
namespace {

double averaged(double old, double value, double beta) {
    return beta < 0 ? old + value : old * beta + value * (1 - beta);
}

double larger(double x, double bound) { return x < bound ? bound : x; }  // NaN stays

// The statistics of one block and its entries of `common`, and with coupling "none" of `change`.
void accumulate_block(Solver& solver, const Form& form, const Vectors& x, const Rows& rows, int64_t i) {
    const int64_t k = rows.block + i;
    const double u = x.sums[k], b = form.raw ? u : x.sums[(form.weighted ? 3 : 2) * x.stride + k];
    const double measure = x.sums[(form.weighted ? 2 : 1) * x.stride + k];
    double n = form.weighted ? std::sqrt(measure) : measure;
    const bool on = n > 0;
    const double scale = on ? 1 / (form.weighted ? n : std::sqrt(rows.size)) : 0;
    if (form.weighted) {
        rows.energy[i] = averaged(rows.energy[i], x.sums[x.stride + k], form.beta);
        n = on ? std::sqrt(rows.energy[i]) : 0;
    }
    solver.scale[k] = scale;
    solver.own[k] = n;
    x.common[k] = scale * b;
    if (rows.width) return;
    rows.U[i] = averaged(rows.U[i], u * u, form.beta);
    const double inverse = n > 0 ? 1 / n : 0;
    const double diagonal = form.keeps_diagonal && n > 0 ? rows.U[i] * inverse * inverse : 1;
    x.change[k] = (1 / std::sqrt(larger(diagonal, form.floor)) - 1) * x.common[k];
}

// c and κ of one block.
void correct_block(const Solver& solver, const Form& form, const Vectors& x, const Rows& rows, int64_t i) {
    const int64_t k = rows.block + i;
    double factor = 1;
    if (form.keeps_trace && rows.size > 1) {
        const double n = solver.own[k], U = rows.U[rows.width ? i * rows.width + rows.column + i : i];
        const double own = n > 0 ? U / n / n : 1;
        const double lambda = (rows.size - larger(own, 1)) / larger(rows.size - 1, 1);
        factor = 1 / std::sqrt(larger(lambda, form.smallest_lambda));
    }
    double c = solver.scale[k] * (x.change[k] + (1 - factor) * x.common[k]);
    if (form.cap >= 0) {
        const double weight = x.sums[5 * x.stride + k];
        const double limit = form.cap * std::sqrt(x.sums[4 * x.stride + k]) / std::sqrt(weight);
        c = !(weight > 0) ? 0 : c < -limit ? -limit : c > limit ? limit : c;
    }
    x.c[k] = c;
    if (x.kappa) x.kappa[k] = factor;
}

// Whether `prepare` and `conclude` solve its blocks.
bool stand_alone(const Solver& solver, const Form& form) {
    return form.weighted && form.cap < 0 && !solver.rows.empty() && !solver.rows[0].width;
}

}  // namespace

void prepare(Solver& solver, const Form& form, const Vectors& x, const Rows& rows, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const int64_t k = rows.block + i;
        const double u = x.sums[k];
        const double U = rows.U[i] = averaged(rows.U[i], u * u, form.beta);
        const double energy = rows.energy[i] = averaged(rows.energy[i], x.sums[x.stride + k], form.beta);
        const double A = energy > 0 ? U / energy : 1;
        const double root = 1 / std::sqrt(larger(A, form.floor));
        double kappa = 1;
        if (form.keeps_trace && rows.size > 1)
            kappa = 1 / std::sqrt(larger((rows.size - larger(A, 1)) / (rows.size - 1), form.smallest_lambda));
        solver.scale[k] = root - kappa;
        solver.own[k] = root;
        if (x.kappa) x.kappa[k] = kappa;
    }
}

void conclude(const Solver& solver, const Vectors& x, const Rows& rows, int64_t begin, int64_t end) {
    for (int64_t k = rows.block + begin; k < rows.block + end; ++k) {
        const double square = x.sums[2 * x.stride + k], b = x.sums[3 * x.stride + k];
        x.common[k] = square > 0 ? b / std::sqrt(square) : 0;
        x.change[k] = (solver.own[k] - 1) * x.common[k];
        x.c[k] = correction(b, square, solver.scale[k]);
        if (x.kappa && !(square > 0)) x.kappa[k] = 1;
    }
}

void accumulate(Solver& solver, const Form& form, const Vectors& x, double* A) {
    const double* u = x.sums;
    if (stand_alone(solver, form)) {
        for (const Rows& rows : solver.rows) prepare(solver, form, x, rows, 0, rows.count);
        for (const Rows& rows : solver.rows) conclude(solver, x, rows, 0, rows.count);
        return;
    }
    for (const Rows& rows : solver.rows)
        for (int64_t i = 0; i < rows.count; ++i) accumulate_block(solver, form, x, rows, i);
    for (Rows& rows : solver.rows) {  // now that n is known for all blocks of a component
        const int64_t first = rows.block - rows.column;
        for (int64_t i = 0; rows.width && i < rows.count; ++i) {
            const int64_t k = rows.block + i, own = rows.column + i;
            double* U = rows.U + i * rows.width;
            double* out = A + rows.origin + own * rows.width;
            const double inverse = solver.own[k] > 0 ? 1 / solver.own[k] : 0;
            for (int64_t j = 0; j < rows.width; ++j) {
                U[j] = averaged(U[j], u[k] * u[first + j], form.beta);
                const double other = solver.own[first + j] > 0 ? 1 / solver.own[first + j] : 0;
                out[j] = U[j] * inverse * other;  // two products: n_i n_j alone may underflow
            }
            if (!form.keeps_diagonal || !(solver.own[k] > 0)) out[own] = 1;
        }
    }
}

void correct(const Solver& solver, const Form& form, const Vectors& x) {
    if (stand_alone(solver, form)) return;  // `accumulate` has done it
    for (const Rows& rows : solver.rows)
        for (int64_t i = 0; i < rows.count; ++i) correct_block(solver, form, x, rows, i);
}

}  // namespace blockmean
