// One step of Anova for a matrix: everything about a row happens while the row is in the cache. The equations are at
// the top of anova.py, and parts.py has the same in torch's operations. Compiled once for every instruction set.

#include "anova.hpp"

#include <cfloat>
#include <cstdlib>
#include <cstring>

#include "products.hpp"

using namespace blockmean;

namespace {

constexpr double INERTIA = 1e-3, CLOSEST = 1e-5, NOISE = 0x1p-19;  // as in _linalg.py

// Nothing of the standard library: the linker would keep one copy of it, perhaps that of another instruction set.
ALWAYS int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
template <class T> ALWAYS T larger(T a, T b) { return a < b ? b : a; }
template <class A> void put(A* to, A* end, A value) {
    for (; to < end; ++to) *to = value;
}
template <class A> void put(A* to, const A* from, int64_t count) {
    if (count) std::memcpy(to, from, sizeof(A) * size_t(count));  // without means there is nothing to point at
}

// Rows that are processed together: enough for long sums; few enough that their entries stay in the cache, and their
// pages in the translation buffer.
int64_t rows_at_a_time(int64_t columns) {
    const int64_t rows = larger<int64_t>((1 << 14) / columns, smaller(36, (1 << 18) / columns));
    return larger<int64_t>(rows / TILE_ROWS, 1) * TILE_ROWS;
}

template <class A> int64_t padded(int64_t k) { return (k + Lanes<A>::W - 1) / Lanes<A>::W * Lanes<A>::W; }

// The scratch memory of a thread. It only grows: a step allocates nothing once all shapes have been seen.
template <class A> struct Scratch {
    A* memory = nullptr;
    size_t size = 0, used = 0;

    ~Scratch() { std::free(memory); }
    void reserve(int64_t entries) {
        used = 0;
        if (size >= size_t(entries)) return;
        std::free(memory);
        size = size_t(entries);
        memory = static_cast<A*>(std::malloc(size * sizeof(A)));
        if (!memory) std::abort();  // a thread has no way to raise
    }
    Place<A> take(int64_t rows, int64_t columns) {
        Place<A> place{memory + used, columns};
        used += size_t(rows * columns);
        return place;
    }
};

// to = from, with zeros in the columns that `from` lacks.
template <class A> void copy(int64_t rows, int64_t columns, const A* from, Place<A> to) {
    for (int64_t i = 0; i < rows; ++i) {
        put(to.data + i * to.row, from + i * columns, columns);
        put(to.data + i * to.row + columns, to.data + (i + 1) * to.row, A(0));
    }
}

// The first columns of `from`.
template <class A> void copy_out(int64_t rows, int64_t columns, Place<const A> from, A* to) {
    for (int64_t i = 0; i < rows; ++i)
        put(to + i * columns, from.data + i * from.row, columns);
}

// to = fromᵀ of the first columns of `from`, with zeros in the columns of `to` that are left.
template <class A> void transpose(int64_t rows, int64_t columns, Place<const A> from, Place<A> to) {
    for (int64_t j = 0; j < columns; ++j) {
        for (int64_t i = 0; i < rows; ++i) to.data[j * to.row + i] = from.data[i * from.row + j];
        put(to.data + j * to.row + rows, to.data + (j + 1) * to.row, A(0));
    }
}
template <class A> void transpose(int64_t rows, int64_t columns, const A* from, Place<A> to) {
    transpose<A>(rows, columns, Place<const A>{from, columns}, to);
}

// ------------------------------------------------------------------ orthonormal columns

// The inverse of the Cholesky factor of a Gram matrix, transposed. False if its columns are nearly parallel.
bool inverse_factor(int64_t k, Place<double> gram, Place<double> inverse) {
    for (int64_t j = 0; j < k; ++j) {
        double* row = gram.data + j * gram.row;
        for (int64_t i = 0; i <= j; ++i) {
            const double* other = gram.data + i * gram.row;
            double sum = row[i];
            for (int64_t l = 0; l < i; ++l) sum -= row[l] * other[l];
            if (i < j) row[i] = sum / other[i];
            else if (!(sum > CLOSEST * CLOSEST)) return false;
            else row[i] = __builtin_sqrt(sum);
        }
    }
    for (int64_t j = 0; j < k; ++j) {
        double* out = inverse.data + j * inverse.row;
        put(out, out + inverse.row, 0.0);
        out[j] = 1 / gram.data[j * gram.row + j];
        for (int64_t i = j + 1; i < k; ++i) {
            const double* row = gram.data + i * gram.row;
            double sum = 0;
            for (int64_t l = j; l < i; ++l) sum += row[l] * out[l];
            out[i] = -sum / row[i];
        }
    }
    return true;
}

// `orthonormalized` of _linalg.py: columns (n × k) that span those of the sketch; W itself if they are nearly parallel.
template <class A>
void orthonormalize(int64_t n, int64_t k, Place<const A> W, Place<const A> sketch, Place<A> out, Scratch<double>& room) {
    const int64_t p = padded<double>(k);
    room.reserve((2 * n + 2 * k + 1) * p);
    Place<double> Z = room.take(n, p), Q = room.take(n, p), gram = room.take(k, p), inverse = room.take(k, p);
    double* const length = room.take(1, p).data;
    put(length, length + p, 0.0);
    for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < k; ++j) length[j] += double(sketch.data[i * sketch.row + j]) * sketch.data[i * sketch.row + j];
    double longest = 0;
    for (int64_t j = 0; j < k; ++j) longest = larger(longest, length[j] = __builtin_sqrt(length[j]));
    for (int64_t j = 0; j < k; ++j) length[j] = length[j] > NOISE * longest ? 1 / length[j] : 0;
    for (int64_t i = 0; i < n; ++i) {
        double* z = Z.data + i * p;
        for (int64_t j = 0; j < k; ++j)
            z[j] = sketch.data[i * sketch.row + j] * length[j] + INERTIA * W.data[i * W.row + j];
        put(z + k, z + p, 0.0);
    }
    bool good = true;
    double* const empty = length;  // 1 for columns that are zero, which stay zero
    for (int pass = 0; pass < 2 && good; ++pass) {
        multiply_transposed<double>(k, p, n, Z, Z, {}, gram);
        for (int64_t j = 0; j < k; ++j) {
            double& diagonal = gram.data[j * p + j];
            if (pass == 0) empty[j] = diagonal == 0;
            diagonal += empty[j];
        }
        good = inverse_factor(k, gram, inverse);
        if (good) multiply<double>(n, p, k, Z, inverse, {}, Q);
        const Place<double> old = Z;
        Z = Q, Q = old;
    }
    for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < out.row; ++j)
            out.data[i * out.row + j] = j >= k ? A(0) : good ? A(Z.data[i * p + j]) : W.data[i * W.row + j];
}

// ------------------------------------------------------------------ one matrix

// What an Adam does to its averages, and what becomes of a step.
template <class A> struct Adam {
    A gain, decay, learn, unbias, floor, longest;  // learn: 1 − decay, before rounding

    // Update m and v with x, in place of which the step appears.
    void step(A* m, A* v, const A* x, A* out, int64_t n) const {
        constexpr int W = Lanes<A>::W;
        int64_t j = 0;
        for (; j + W <= n; j += W) {
            Vec<A> mean = load(m + j), square = load(v + j);
            store(out + j, next(mean, square, load(x + j)));
            store(m + j, mean);
            store(v + j, square);
        }
        if (j < n) {
            const int rest = int(n - j);
            Vec<A> mean = load(m + j, rest), square = load(v + j, rest);
            store(out + j, next(mean, square, load(x + j, rest)), rest);
            store(m + j, mean, rest);
            store(v + j, square, rest);
        }
    }
    ALWAYS Vec<A> next(Vec<A>& mean, Vec<A>& square, Vec<A> x) const {
        mean += gain * (x - mean);
        square = decay * square + learn * (x * x);
        Vec<A> out = mean / (floor + unbias * root(square));
        out = out > longest ? fill<Vec<A>>(longest) : out;
        return out < -longest ? fill<Vec<A>>(-longest) : out;
    }
    void step(int64_t rows, int64_t columns, A* m, A* v, Place<const A> x, Place<A> out) const {
        for (int64_t i = 0; i < rows; ++i)
            step(m + i * columns, v + i * columns, x.data + i * x.row, out.data + i * out.row, columns);
    }
};

// P: how parameters and gradients are stored; A: arithmetic and state.
template <class P> struct Work {
    typedef typename Arithmetic<P>::type A;
    static constexpr bool converts = sizeof(P) != sizeof(A);

    const Matrix& matrix;
    const int64_t O = matrix.units, I = matrix.inputs, k = matrix.unit_means, q = matrix.input_means;
    const int64_t kp = padded<A>(k), qp = padded<A>(q), height = rows_at_a_time(I);
    const int64_t inner = matrix.inner, channels = I / inner;
    const bool in_place = !converts && inner == 1;  // else the step is put together first, and rounded once
    P* const param = reinterpret_cast<P*>(matrix.param);
    const P* const grad = reinterpret_cast<const P*>(matrix.grad);

    A* state(State which) const { return reinterpret_cast<A*>(matrix.state[which]); }

    // Some rows of the gradient, converted and in order.
    Place<const A> rows(int64_t top, int64_t n, Place<A> room, bool maximize) const {
        const P* from = grad + top * I;
        if constexpr (!converts) {
            if (!maximize && inner == 1) return {from, I};
        }
        constexpr int W = Lanes<A>::W;
        const A sign = maximize ? -1 : 1;
        if (inner > 1) {
            for (int64_t i = 0; i < n; ++i)
                for (int64_t s = 0; s < inner; ++s)
                    for (int64_t c = 0; c < channels; ++c)
                        room.data[i * I + c * inner + s] = sign * load(from + i * I + s * channels + c, 1)[0];
            return room;
        }
        int64_t j = 0;
        for (; j + W <= n * I; j += W) store(room.data + j, sign * load(from + j));
        if (j < n * I) store(room.data + j, sign * load(from + j, int(n * I - j)), int(n * I - j));
        return room;
    }

    double square() const {
        constexpr int W = Lanes<A>::W;
        const int64_t n = O * I;
        Total<A> total;
        int64_t j = 0;
        for (; j + W <= n; j += W) {
            const Vec<A> a = load(grad + j);
            total.add(a * a);
        }
        if (j < n) {
            const Vec<A> a = load(grad + j, int(n - j));
            total.add(a * a);
        }
        // In torch's operations the length of a float32 gradient is a float32.
        const double most = sizeof(A) == sizeof(float) ? double(FLT_MAX) : DBL_MAX, sum = total.sum();
        return sum > most ? __builtin_inf() : sum;
    }

    void apply(const Step& step, Scratch<A>& scratch) const {
        const int64_t kept = in_place ? smaller(height, O) : O;  // rows of E
        const int64_t deep = q + k;
        scratch.reserve((height + kept + deep) * I + O * (deep + 2 * (kp + qp)) + I * (kp + qp) + 2 * k * (I + qp));
        const Place<A> room = scratch.take(height, I), E = scratch.take(kept, I);
        const Place<A> U = scratch.take(O, kp), GGU = scratch.take(O, kp), R = scratch.take(O, qp);
        const Place<A> V = scratch.take(I, qp), GU = scratch.take(I, kp), L_step = scratch.take(k, I);
        const Place<A> GV = scratch.take(O, qp), UG = scratch.take(k, I);
        const Place<A> K = scratch.take(k, qp), K_step = scratch.take(k, qp);
        // G without its remainder is left · right; so is the step.
        const Place<A> left = scratch.take(deep, O), right = scratch.take(deep, I);
        const Place<const A> Vt{state(INPUTS), I};
        A *const unit_sketch = state(UNITS_SKETCH), *const input_sketch = state(INPUTS_SKETCH);
        copy(O, k, state(UNITS), U);
        transpose(q, I, Vt.data, V);
        const A forget = A(step.forget), learn = A(1 - step.forget), rate = A(step.rate), decay = A(step.decay);
        for (int64_t j = 0; j < q * I; ++j) input_sketch[j] *= forget;
        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            const Place<const A> G = rows(top, n, room, step.maximize);
            multiply<A>(n, qp, I, G, V, {}, GV.at(top));
            multiply_transposed<A>(k, I, n, U.at(top), G, top ? Place<const A>(UG) : Place<const A>{}, UG);
            multiply_transposed<A>(q, I, n, GV.at(top), G, {input_sketch, I}, {input_sketch, I}, learn);
        }
        pair_up(GV, U, left);

        // K, R and L, and the steps of their Adams.
        multiply_transposed<A>(k, qp, O, U, GV, {}, K);
        multiply<A>(O, qp, k, U, K, GV, R, -1);
        multiply<A>(k, I, q, K, Vt, UG, L_step, -1);
        stack_up(Vt.data, L_step.data, right);
        put(K_step.data, K_step.data + k * qp, A(0));
        const double length = __builtin_sqrt(matrix.square) * step.noise;
        const double units = __builtin_sqrt(double(O)), inputs = __builtin_sqrt(double(I));
        const auto adam = [&](double size, bool is_remainder) {
            const double decay = is_remainder ? step.beta2 : step.mean_beta;
            const double unbias = is_remainder ? step.unbias_rest : step.unbias_means;
            const double longest = is_remainder ? step.longest_rest : step.longest_means;
            const double floor = larger(length / size + step.eps, step.smallest);
            return Adam<A>{A(1 - step.beta1), A(decay), A(1 - decay), A(unbias), A(floor), A(longest)};
        };
        adam(1, false).step(k, q, state(GRAND_AVG), state(GRAND_SQ), K, K_step);
        adam(units, false).step(O, q, state(UNIT_AVG), state(UNIT_SQ), R, R);
        adam(inputs, false).step(k, I, state(INPUT_AVG), state(INPUT_SQ), L_step, L_step);
        const Adam<A> remainder = adam(units * inputs, true);
        multiply<A>(k, qp, I, L_step, V, K_step, K_step, -1);
        transpose(k, I, UG.data, GU);

        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            const Place<const A> G = rows(top, n, room, step.maximize);
            const Place<A> e = in_place ? E : E.at(top);
            add(top, n, left, right, G, e, -1);
            remainder.step(state(MEAN) + top * I, state(SQUARE) + top * I, e.data, e.data, n * I);
            // R', L' and K' minus what E' has of them.
            multiply<A>(n, qp, I, e, V, R.at(top), R.at(top), -1);
            multiply_transposed<A>(k, I, n, U.at(top), e, L_step, L_step, -1);
            multiply<A>(n, kp, I, G, GU, {}, GGU.at(top), learn);
            if (in_place) move(param + top * I, e.data, n * I, rate, decay);
        }
        for (int64_t i = 0; i < O; ++i)
            for (int64_t j = 0; j < k; ++j) unit_sketch[i * k + j] = forget * unit_sketch[i * k + j] + GGU.data[i * kp + j];
        multiply_transposed<A>(k, qp, O, U, R, K_step, K_step, -1);
        multiply<A>(O, qp, k, U, K_step, R, R);
        pair_up(R, U, left);
        stack_up(Vt.data, L_step.data, right);
        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            const Place<A> out = in_place ? Place<A>{reinterpret_cast<A*>(param) + top * I, I} : E.at(top);
            add(top, n, left, right, out, out, in_place ? -rate : 1);
            if (in_place) continue;
            if (inner == 1) move(param + top * I, out.data, n * I, rate, decay);
            else move_channels_last(param + top * I, out, n, rate, decay);
        }
    }

    // θ ← decay · θ − rate · δ, rounded once.
    static void move(P* theta, const A* delta, int64_t n, A rate, A decay) {
        constexpr int W = Lanes<A>::W;
        int64_t j = 0;
        for (; j + W <= n; j += W) store(theta + j, decay * load(theta + j) - rate * load(delta + j));
        if (j < n) {
            const int rest = int(n - j);
            store(theta + j, decay * load(theta + j, rest) - rate * load(delta + j, rest), rest);
        }
    }

    void move_channels_last(P* theta, Place<const A> delta, int64_t n, A rate, A decay) const {
        for (int64_t i = 0; i < n; ++i)
            for (int64_t s = 0; s < inner; ++s)
                for (int64_t c = 0; c < channels; ++c) {
                    P* at = theta + i * I + s * channels + c;
                    store(at, decay * load(at, 1) - rate * load(delta.data + i * I + c * inner + s, 1), 1);
                }
    }

    static bool has_empty_column(int64_t rows, int64_t columns, const A* x, int64_t by_row, int64_t by_column) {
        for (int64_t j = 0; j < columns; ++j) {
            int64_t i = 0;
            while (i < rows && x[i * by_row + j * by_column] == 0) ++i;
            if (i == rows) return true;
        }
        return false;
    }

    bool turn(Scratch<A>& scratch, Scratch<double>& wide) const {
        A *const m = state(MEAN), *const K_avg = state(GRAND_AVG), *const R_avg = state(UNIT_AVG), *const L_avg = state(INPUT_AVG);
        A *const K_sq = state(GRAND_SQ), *const R_sq = state(UNIT_SQ), *const L_sq = state(INPUT_SQ);
        A* const Vt = state(INPUTS);
        if (has_empty_column(O, k, state(UNITS), k, 1) || has_empty_column(I, q, Vt, 1, I)) return false;
        scratch.reserve(O * (3 * kp + 2 * qp) + 3 * I * qp + 2 * k * (I + qp) + k * kp + q * qp + (q + k) * (O + I));
        const Place<A> U = scratch.take(O, kp), new_U = scratch.take(O, kp), unit_sketch = scratch.take(O, kp);
        const Place<A> mV = scratch.take(O, qp), R = scratch.take(O, qp);
        const Place<A> left = scratch.take(q + k, O), right = scratch.take(q + k, I);
        const Place<A> V = scratch.take(I, qp), new_V = scratch.take(I, qp), input_sketch = scratch.take(I, qp);
        const Place<A> Um = scratch.take(k, I), L = scratch.take(k, I), K = scratch.take(k, qp), small = scratch.take(k, qp);
        const Place<A> by_U = scratch.take(k, kp), by_V = scratch.take(q, qp);
        copy(O, k, state(UNITS), U);
        copy(O, k, state(UNITS_SKETCH), unit_sketch);
        transpose(q, I, Vt, V);
        transpose(q, I, state(INPUTS_SKETCH), input_sketch);

        // Put m together: U K Vᵀ + R Vᵀ + U L + E.
        copy(k, q, K_avg, K);
        copy(O, q, R_avg, R);
        multiply<A>(O, qp, k, U, K, R, R);
        pair_up(R, U, left);
        stack_up(Vt, L_avg, right);
        add(m, left, right, 1);
        orthonormalize<A>(O, k, U, unit_sketch, new_U, wide);
        orthonormalize<A>(I, q, V, input_sketch, new_V, wide);

        // Squares follow the rotation.
        multiply_transposed<A>(k, kp, O, U, new_U, {}, by_U);
        multiply_transposed<A>(q, qp, I, V, new_V, {}, by_V);
        for (int64_t j = 0; j < k * kp; ++j) by_U.data[j] *= by_U.data[j];
        for (int64_t j = 0; j < q * qp; ++j) by_V.data[j] *= by_V.data[j];
        copy(k, q, K_sq, small);
        multiply_transposed<A>(k, qp, k, by_U, small, {}, K);
        multiply<A>(k, q, q, K, by_V, {}, {K_sq, q});
        copy(O, q, R_sq, R);
        multiply<A>(O, q, q, R, by_V, {}, {R_sq, q});
        copy(k, I, L_sq, L);
        multiply_transposed<A>(k, I, k, by_U, L, {}, {L_sq, I});

        // The sketches keep what lies in the new spaces.
        multiply_transposed<A>(k, kp, O, new_U, unit_sketch, {}, by_U);
        multiply<A>(O, k, k, new_U, by_U, {}, {state(UNITS_SKETCH), k});
        multiply_transposed<A>(q, qp, I, new_V, input_sketch, {}, by_V);
        multiply<A>(I, qp, q, new_V, by_V, {}, input_sketch);
        for (int64_t j = 0; j < q; ++j)
            for (int64_t i = 0; i < I; ++i) {
                state(INPUTS_SKETCH)[j * I + i] = input_sketch.data[i * qp + j];
                Vt[j * I + i] = new_V.data[i * qp + j];
            }
        copy_out<A>(O, k, new_U, state(UNITS));

        // Split m with the new U and V.
        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            const Place<const A> part{m + top * I, I};
            multiply<A>(n, qp, I, part, new_V, {}, mV.at(top));
            multiply_transposed<A>(k, I, n, new_U.at(top), part, top ? Place<const A>(Um) : Place<const A>{}, Um);
        }
        multiply_transposed<A>(k, qp, O, new_U, mV, {}, K);
        multiply<A>(O, qp, k, new_U, K, mV, R, -1);
        multiply<A>(k, I, q, K, {Vt, I}, Um, {L_avg, I}, -1);
        copy_out<A>(k, q, K, K_avg);
        copy_out<A>(O, q, R, R_avg);
        pair_up(mV, new_U, left);
        stack_up(Vt, L_avg, right);
        add(m, left, right, -1);
        return true;
    }

    // (unit means, U)ᵀ and Vᵀ over L: their product is a matrix but for its remainder.
    void pair_up(Place<const A> unit_means, Place<const A> U, Place<A> left) const {
        transpose<A>(O, q, unit_means, left);
        transpose<A>(O, k, U, left.at(q));
    }
    void stack_up(const A* Vt, const A* L, Place<A> right) const {
        put(right.data, Vt, q * I);
        put(right.at(q).data, L, k * I);
    }

    // to = from + alpha left · right, for some rows.
    void add(int64_t top, int64_t n, Place<const A> left, Place<const A> right, Place<const A> from, Place<A> to, A alpha) const {
        multiply_transposed<A>(n, I, q + k, left.at(0, top), right, from, to, alpha);
    }
    void add(A* m, Place<const A> left, Place<const A> right, A alpha) const {
        for (int64_t top = 0; top < O; top += height) {
            const Place<A> part{m + top * I, I};
            add(top, smaller(height, O - top), left, right, part, part, alpha);
        }
    }
};

template <class A> Scratch<A>& scratch() {
    static thread_local Scratch<A> own;
    return own;
}

template <class P> struct Calls {
    typedef typename Arithmetic<P>::type A;
    static void sums(Matrix& matrix) { matrix.square = Work<P>{matrix}.square(); }
    static void apply(const Matrix& matrix, const Step& step) { Work<P>{matrix}.apply(step, scratch<A>()); }
    static bool turn(const Matrix& matrix) {
        static thread_local Scratch<double> wide;
        return Work<P>{matrix}.turn(scratch<A>(), wide);
    }
};

void sums(Matrix& matrix) {
    switch (matrix.dtype) {
        case FLOAT32: return Calls<float>::sums(matrix);
        case FLOAT64: return Calls<double>::sums(matrix);
        case BFLOAT16: return Calls<bfloat16>::sums(matrix);
        default: return Calls<float16>::sums(matrix);
    }
}

void apply(const Matrix& matrix, const Step& step) {
    switch (matrix.dtype) {
        case FLOAT32: return Calls<float>::apply(matrix, step);
        case FLOAT64: return Calls<double>::apply(matrix, step);
        case BFLOAT16: return Calls<bfloat16>::apply(matrix, step);
        default: return Calls<float16>::apply(matrix, step);
    }
}

bool turn(const Matrix& matrix) {  // only state, which is never in half precision
    return matrix.dtype == FLOAT64 ? Calls<double>::turn(matrix) : Calls<float>::turn(matrix);
}

}  // namespace

#define JOIN_AS_IS(a, b) a##b
#define JOIN(a, b) JOIN_AS_IS(a, b)
extern const AnovaKernels blockmean::JOIN(anova_, VARIANT) = {sums, apply, turn};
