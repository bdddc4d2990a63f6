// One step of Anova for a matrix: everything about a row happens while the row is in the cache. The equations are at
// the top of anova.py, and parts.py has the same in torch's operations. Compiled once for every instruction set.

#include "anova.hpp"

#include <cfloat>
#include <cstdlib>
#include <cstring>

#include "products.hpp"

using namespace blockmean;

namespace {

constexpr int LINE = 64;  // bytes of a line of the cache
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

constexpr int64_t SMALL = 1 << 14;  // entries of a matrix whose gradient and moments the second-level cache holds
// Rows that are processed together: enough for long sums; few enough that their gradient and their step stay in the cache.
constexpr int64_t BLOCK = 48;

template <class A> int64_t padded(int64_t k) { return (k + Lanes<A>::W - 1) / Lanes<A>::W * Lanes<A>::W; }

// The scratch memory of a thread. It only grows: a step allocates nothing once all shapes have been seen.
template <class A> struct Scratch {
    A* memory = nullptr;
    size_t size = 0, used = 0;

    ~Scratch() { std::free(memory); }
    // A vector that lies in two lines of the cache takes twice as long.
    static size_t rounded(size_t entries) { return (entries * sizeof(A) + LINE - 1) / LINE * LINE / sizeof(A); }
    void reserve(int64_t entries, int places) {
        used = 0;
        const size_t all = rounded(size_t(entries)) + size_t(places) * LINE / sizeof(A);
        if (size >= all) return;
        std::free(memory);
        size = all;
        memory = static_cast<A*>(std::aligned_alloc(LINE, size * sizeof(A)));
        if (!memory) std::abort();  // a thread has no way to raise
    }
    Place<A> take(int64_t rows, int64_t columns) {
        Place<A> place{memory + used, columns};
        used += rounded(size_t(rows * columns));
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
    constexpr int W = Lanes<A>::W;
    for (int64_t i = 0; i < rows; i += W)
        for (int64_t j = 0; j < columns; j += W) {
            const int high = int(smaller(W, rows - i)), wide = int(smaller(W, columns - j));
            Vec<A> x[W];
            for (int l = 0; l < W; ++l) {
                const A* const row = from.data + (i + l) * from.row + j;
                x[l] = l >= high ? Vec<A>{} : wide == W ? load(row) : load(row, wide);
            }
            exchange<A>(x);
            for (int l = 0; l < wide; ++l) {
                A* const row = to.data + (j + l) * to.row + i;
                if (high == W) store(row, x[l]);
                else store(row, x[l], high);
            }
        }
    for (int64_t j = 0; j < columns; ++j) put(to.data + j * to.row + rows, to.data + (j + 1) * to.row, A(0));
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
    room.reserve((3 * n + 2 * k + 1) * p, 6);
    Place<double> Z = room.take(n, p), Q = room.take(n, p), gram = room.take(k, p), inverse = room.take(k, p);
    const Place<double> Zt = room.take(k, n);
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
        multiply<double>(k, p, n, Z, Z, {}, gram);
        for (int64_t j = 0; j < k; ++j) {
            double& diagonal = gram.data[j * p + j];
            if (pass == 0) empty[j] = diagonal == 0;
            diagonal += empty[j];
        }
        good = inverse_factor(k, gram, inverse);
        transpose<double>(n, k, Z, Zt);
        if (good) multiply<double>(n, p, k, Zt, inverse, {}, Q);
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
    // The rows of m and v are `row` apart.
    void step(int64_t rows, int64_t columns, A* m, A* v, int64_t row, Place<const A> x, Place<A> out) const {
        for (int64_t i = 0; i < rows; ++i)
            step(m + i * row, v + i * row, x.data + i * x.row, out.data + i * out.row, columns);
    }
};

// P: how parameters and gradients are stored; A: arithmetic and state.
template <class P> struct Work {
    typedef typename Arithmetic<P>::type A;
    static constexpr bool converts = sizeof(P) != sizeof(A);
    static constexpr int W = Lanes<A>::W;

    const Matrix& matrix;
    const int64_t O = matrix.units, I = matrix.inputs, k = matrix.unit_means, q = matrix.input_means;
    const int64_t kp = padded<A>(k), qp = padded<A>(q), deep = q + k, height = smaller(BLOCK, O);
    const bool is_small = O * I <= SMALL;
    // Rows whose moments are updated together: few if they come from memory.
    const int64_t group = is_small ? height : most_rows(ACROSS);
    const int64_t panels = (I + PANEL<A> - 1) / PANEL<A>, wide = panels * PANEL<A>;
    const int64_t inner = matrix.inner, channels = I / inner;
    const bool in_place = !converts && inner == 1;  // else the step is put together first, and rounded once
    P* const param = reinterpret_cast<P*>(matrix.param);
    const P* const grad = reinterpret_cast<const P*>(matrix.grad);

    A* state(State which) const { return reinterpret_cast<A*>(matrix.state[which]); }

    int64_t width(int64_t panel) const { return smaller(PANEL<A>, I - panel * PANEL<A>); }

    Panels<A> take_panels(Scratch<A>& scratch, int64_t rows) const { return {scratch.take(rows, wide).data, rows}; }

    // Rows of a matrix with I columns, as they are and multiplied by a sign, from row `first` of the panels on.
    template <class T> void pack(int64_t n, const T* from, Panels<A> to, int64_t first = 0, A sign = 1) const {
        for (int64_t i = 0; i < n; ++i, from += I)
            for (int64_t p = 0; p < panels; ++p) {
                A* const out = to.at(p, first + i).data;
                for (int j = 0; j < PANEL<A>; j += W) {
                    const int64_t rest = width(p) - j;
                    const T* at = from + p * PANEL<A> + j;
                    store(out + j, rest >= W ? sign * load(at) : rest > 0 ? sign * load(at, int(rest)) : Vec<A>{});
                }
            }
    }
    void unpack(int64_t n, Panels<A> from, int64_t first, A* to) const {
        for (int64_t p = 0; p < panels; ++p)
            for (int64_t i = 0; i < n; ++i) put(to + i * I + p * PANEL<A>, from.at(p, first + i).data, width(p));
    }

    // Row i, channel c, position s of a convolution: input c · inner + s.
    A* entry(Panels<A> of, int64_t i, int64_t c, int64_t s) const {
        const int64_t j = c * inner + s;
        return of.at(j / PANEL<A>, i).data + j % PANEL<A>;
    }

    // Some rows of the gradient, converted and in order.
    void pack_gradient(int64_t top, int64_t n, Panels<A> to, bool maximize) const {
        const P* from = grad + top * I;
        const A sign = maximize ? -1 : 1;
        if (inner == 1) return pack(n, from, to, 0, sign);
        for (int64_t i = 0; i < n; ++i) {
            A* const last = to.at(panels - 1, i).data;
            put(last + width(panels - 1), last + PANEL<A>, A(0));  // no sum reads these: tiles may compute with them
            for (int64_t s = 0; s < inner; ++s)
                for (int64_t c = 0; c < channels; ++c) *entry(to, i, c, s) = sign * load(from++, 1)[0];
        }
    }

    // ‖G‖², in four places at once: a processor fetches memory for a single stream more slowly than it could.
    double square() const {
        constexpr int64_t CHUNK = 16 * W;
        const int64_t n = O * I, quarter = n / STREAMS / CHUNK * CHUNK;
        Total<A> totals[STREAMS];
        for (int64_t at = 0; at < quarter; at += CHUNK)
            for (int s = 0; s < STREAMS; ++s)
                for (int64_t j = at; j < at + CHUNK; j += W) {
                    const Vec<A> a = load(grad + s * quarter + j);
                    totals[s].add(a * a);
                }
        for (int64_t j = STREAMS * quarter; j < n; j += W) {
            const Vec<A> a = n - j >= W ? load(grad + j) : load(grad + j, int(n - j));
            totals[0].add(a * a);
        }
        double sum = 0;
        for (const Total<A>& total : totals) sum += total.sum();
        // In torch's operations the length of a float32 gradient is a float32.
        const double most = sizeof(A) == sizeof(float) ? double(FLT_MAX) : DBL_MAX;
        return sum > most ? __builtin_inf() : sum;
    }

    // Have a panel of some rows brought near, from entry `at` on, while something else is computed.
    template <class T> void fetch(const T* matrix, int64_t at, int64_t rows) const {
        if (is_small) return;
        for (const int64_t end = smaller(at + rows * I, O * I); at < end; at += I)
            for (int64_t j = 0; j < PANEL<A>; j += LINE / sizeof(T)) __builtin_prefetch(matrix + at + j, 0, 2);
    }

    void apply(const Step& step, Scratch<A>& scratch) const {
        const int64_t kept = in_place ? height : O;  // rows of E
        scratch.reserve((height + kept + 2 * deep + k) * wide + height * PANEL<A> + O * (deep + 2 * (kp + qp)) +
                            I * (kp + qp) + 2 * k * qp + q * kp, 18);
        const Panels<A> G = take_panels(scratch, height), E = take_panels(scratch, kept), L_step = take_panels(scratch, k);
        // G without its remainder is leftᵀ · right; so is the step.
        const Panels<A> UG = take_panels(scratch, k), GGV = take_panels(scratch, q), right = take_panels(scratch, deep);
        A* const left = scratch.take(deep, O).data;
        const Place<A> U = scratch.take(O, kp), GGU = scratch.take(O, kp), GV = scratch.take(O, qp), R = scratch.take(O, qp);
        const Place<A> V = scratch.take(I, qp), GU = scratch.take(I, kp);
        const Place<A> K = scratch.take(k, qp), K_step = scratch.take(k, qp), Kt = scratch.take(q, kp);
        const Place<A> part = scratch.take(height, PANEL<A>);
        const A *const Vt = state(INPUTS), forget = A(step.forget), learn = A(1 - step.forget), rate = A(step.rate), decay = A(step.decay);
        copy(O, k, state(UNITS), U);
        transpose<A>(q, I, {Vt, I}, V);
        pack(q, Vt, right);
        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            const Panels<A> g{G.data, n};
            pack_gradient(top, n, g, step.maximize);
            multiply<A>(n, qp, I, g, 0, V, {}, GV.at(top));
            for (int64_t p = 0; p < panels; ++p) {
                add(k, n, p, U.at(top), g, top > 0, UG);
                add(q, n, p, GV.at(top), g, top > 0, GGV);
            }
        }
        A* const input_sketch = state(INPUTS_SKETCH);
        for (int64_t p = 0; p < panels; ++p)
            for (int64_t i = 0; i < q; ++i)
                blend(input_sketch + i * I + p * PANEL<A>, GGV.at(p, i).data, width(p), forget, learn);
        pair_up(GV, U, left, deep);

        // K, R and L, and the steps of their Adams.
        multiply<A>(q, kp, O, GV, U, {}, Kt);
        transpose<A>(q, k, Kt, K);
        on_units(left, deep, q, k, K, GV, R, -1);
        for (int64_t p = 0; p < panels; ++p) multiply<A>(k, vectors(p), q, Kt, right.at(p), UG.at(p), right.at(p, q), -1);
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
        adam(1, false).step(k, q, state(GRAND_AVG), state(GRAND_SQ), q, K, K_step);
        adam(units, false).step(O, q, state(UNIT_AVG), state(UNIT_SQ), q, R, R);
        for (int64_t p = 0; p < panels; ++p) {
            put(L_step.at(p).data, right.at(p, q).data, k * PANEL<A>);
            A *const m = state(INPUT_AVG) + p * PANEL<A>, *const v = state(INPUT_SQ) + p * PANEL<A>;
            adam(inputs, false).step(k, width(p), m, v, I, right.at(p, q), L_step.at(p));
        }
        const Adam<A> remainder = adam(units * inputs, true);
        multiply<A>(k, qp, I, L_step, 0, V, K_step, K_step, -1);
        for (int64_t p = 0; p < panels; ++p) transpose<A>(k, width(p), UG.at(p), GU.at(p * PANEL<A>));

        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            const Panels<A> g{G.data, n}, e{in_place ? E.data : E.data + top * wide, n};
            pack_gradient(top, n, g, step.maximize);
            for (int64_t i = 0; i < n; i += group) {
                const int64_t rows = smaller(group, n - i);
                const Place<const A> own = block(left, top, deep).at(0, i);
                for (int64_t p = 0; p < panels; ++p) {
                    const int64_t at = (top + i) * I + p * PANEL<A>;
                    const int64_t ahead = p + 1 < panels ? at + PANEL<A> : at + rows * I - p * PANEL<A>;
                    fetch(state(MEAN), ahead, rows);
                    fetch(state(SQUARE), ahead, rows);
                    if (in_place) fetch(param, ahead, rows);
                    multiply<A>(rows, vectors(p), deep, own, right.at(p), g.at(p, i), e.at(p, i), -1);
                    remainder.step(rows, width(p), state(MEAN) + at, state(SQUARE) + at, I, e.at(p, i), e.at(p, i));
                    if (in_place) move(at, rows, width(p), e.at(p, i), rate, decay);
                }
            }
            // R', L' and K' minus what E' has of them.
            for (int64_t p = 0; p < panels; ++p) multiply<A>(k, vectors(p), n, U.at(top), e.at(p), L_step.at(p), L_step.at(p), -1);
            multiply<A>(n, qp, I, e, 0, V, R.at(top), R.at(top), -1);
            multiply<A>(n, kp, I, g, 0, GU, {}, GGU.at(top));
        }
        for (int64_t i = 0; i < O; ++i) blend(state(UNITS_SKETCH) + i * k, GGU.data + i * kp, k, forget, learn);
        multiply<A>(k, qp, O, U, R, K_step, K_step, -1);
        on_units(left, deep, q, k, K_step, R, R, 1);
        pair_up(R, U, left, deep);
        for (int64_t p = 0; p < panels; ++p) put(right.at(p, q).data, L_step.at(p).data, k * PANEL<A>);
        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            const Panels<A> e{in_place ? E.data : E.data + top * wide, n};
            for (int64_t p = 0; p < panels; ++p) {
                const int64_t at = top * I + p * PANEL<A>;
                const Place<A> out = in_place ? part : e.at(p);
                fetch(param, at, n);
                multiply<A>(n, vectors(p), deep, block(left, top, deep), right.at(p), in_place ? Place<A>{} : out, out);
                if (inner == 1) move(at, n, width(p), out, rate, in_place ? A(1) : decay);
            }
            if (inner > 1) move_channels_last(top, n, e, rate, decay);
        }
    }

    // to ← forget · to + learn · from
    static void blend(A* to, const A* from, int64_t n, A forget, A learn) {
        for (int64_t j = 0; j < n; ++j) to[j] = forget * to[j] + learn * from[j];
    }

    // θ ← decay · θ − rate · δ, rounded once; some rows from entry `at` on.
    void move(int64_t at, int64_t rows, int64_t columns, Place<const A> delta, A rate, A decay) const {
        for (int64_t i = 0; i < rows; ++i) {
            P* const theta = param + at + i * I;
            const A* const d = delta.data + i * delta.row;
            int64_t j = 0;
            for (; j + W <= columns; j += W) store(theta + j, decay * load(theta + j) - rate * load(d + j));
            if (j < columns) {
                const int rest = int(columns - j);
                store(theta + j, decay * load(theta + j, rest) - rate * load(d + j, rest), rest);
            }
        }
    }

    void move_channels_last(int64_t top, int64_t n, Panels<A> delta, A rate, A decay) const {
        P* theta = param + top * I;
        for (int64_t i = 0; i < n; ++i)
            for (int64_t s = 0; s < inner; ++s)
                for (int64_t c = 0; c < channels; ++c, ++theta)
                    store(theta, decay * load(theta, 1) - rate * load(entry(delta, i, c, s), 1), 1);
    }

    static bool has_empty_column(int64_t rows, int64_t columns, const A* x, int64_t by_row, int64_t by_column) {
        for (int64_t j = 0; j < columns; ++j) {
            int64_t i = 0;
            while (i < rows && x[i * by_row + j * by_column] == 0) ++i;
            if (i == rows) return true;
        }
        return false;
    }

    bool turn(Scratch<A>& scratch, Scratch<double>& broad) const {
        A *const m = state(MEAN), *const Vt = state(INPUTS);
        if (has_empty_column(O, k, state(UNITS), k, 1) || has_empty_column(I, q, Vt, 1, I)) return false;
        const int64_t both = 2 * deep;
        scratch.reserve((height + k + both) * wide + O * (both + 3 * kp + 2 * qp) + 3 * I * qp + height * PANEL<A> +
                            2 * k * qp + 2 * q * kp + deep * (kp + qp) + q * qp + k * kp, 20);
        // m is leftᵀ · right + E before and after: the rows from `deep` on are those of the new U and V, with a minus.
        const Panels<A> E = take_panels(scratch, height), Um = take_panels(scratch, k), right = take_panels(scratch, both);
        A* const left = scratch.take(both, O).data;
        const Place<A> U = scratch.take(O, kp), new_U = scratch.take(O, kp), unit_sketch = scratch.take(O, kp);
        const Place<A> mV = scratch.take(O, qp), R = scratch.take(O, qp), part = scratch.take(height, PANEL<A>);
        const Place<A> V = scratch.take(I, qp), new_V = scratch.take(I, qp), input_sketch = scratch.take(I, qp);
        const Place<A> K = scratch.take(k, qp), small = scratch.take(k, qp), Kt = scratch.take(q, kp);
        const Place<A> on_V = scratch.take(deep, qp), on_U = scratch.take(deep, kp);  // what E lacks of m V and of mᵀ U
        const Place<A> by_V = scratch.take(q, qp), by_U = scratch.take(k, kp);
        copy(O, k, state(UNITS), U);
        copy(O, k, state(UNITS_SKETCH), unit_sketch);
        transpose<A>(q, I, {Vt, I}, V);
        transpose<A>(q, I, {state(INPUTS_SKETCH), I}, input_sketch);
        orthonormalize<A>(O, k, U, unit_sketch, new_U, broad);
        orthonormalize<A>(I, q, V, input_sketch, new_V, broad);
        multiply<A>(q, qp, I, V, new_V, {}, by_V);
        multiply<A>(k, kp, O, U, new_U, {}, by_U);
        pack(q, Vt, right);
        pack(k, state(INPUT_AVG), right, q);
        transpose<A>(I, q, new_V, {Vt, I});
        pack(q, Vt, right, deep);

        // m without E is (R + U K) Vᵀ + U L.
        copy(k, q, state(GRAND_AVG), K);
        copy(O, q, state(UNIT_AVG), R);
        pair_up(R, U, left, both);
        on_units(left, both, q, k, K, R, R, 1);
        pair_up(R, U, left, both);
        put(on_V.data, by_V.data, q * qp);
        multiply<A>(k, qp, I, right, q, new_V, {}, on_V.at(q));
        multiply<A>(q, kp, O, R, new_U, {}, on_U);
        put(on_U.at(q).data, by_U.data, k * kp);

        // Squares follow the rotation.
        for (int64_t j = 0; j < k * kp; ++j) by_U.data[j] *= by_U.data[j];
        for (int64_t j = 0; j < q * qp; ++j) by_V.data[j] *= by_V.data[j];
        copy(k, q, state(GRAND_SQ), small);
        multiply<A>(q, kp, k, small, by_U, {}, Kt);
        multiply<A>(k, qp, q, Kt, by_V, {}, K);
        copy_out<A>(k, q, K, state(GRAND_SQ));
        pair_up({state(UNIT_SQ), q}, new_U, left, both, deep);
        on_units(left, both, deep, q, by_V, {}, R, 1);
        copy_out<A>(O, q, R, state(UNIT_SQ));
        pack(k, state(INPUT_SQ), Um);
        for (int64_t p = 0; p < panels; ++p) multiply<A>(k, vectors(p), k, by_U, Um.at(p), {}, right.at(p, deep + q));
        unpack(k, right, deep + q, state(INPUT_SQ));

        // The sketches keep what lies in the new spaces.
        multiply<A>(k, kp, O, new_U, unit_sketch, {}, by_U);
        on_units(left, both, deep + q, k, by_U, {}, unit_sketch, 1);
        copy_out<A>(O, k, unit_sketch, state(UNITS_SKETCH));
        multiply<A>(q, qp, I, new_V, input_sketch, {}, by_V);
        multiply<A>(I, qp, q, {Vt, I}, by_V, {}, input_sketch);
        transpose<A>(I, q, input_sketch, {state(INPUTS_SKETCH), I});
        copy_out<A>(O, k, new_U, state(UNITS));

        // Split m with the new U and V.
        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            const Panels<A> e{E.data, n};
            pack(n, m + top * I, e);
            multiply<A>(n, qp, I, e, 0, new_V, {}, mV.at(top));
            for (int64_t p = 0; p < panels; ++p) add(k, n, p, new_U.at(top), e, top > 0, Um);
        }
        on_units(left, both, 0, deep, on_V, mV, mV, 1);
        for (int64_t p = 0; p < panels; ++p) multiply<A>(k, vectors(p), deep, on_U, right.at(p), Um.at(p), Um.at(p));
        multiply<A>(q, kp, O, mV, new_U, {}, Kt);
        transpose<A>(q, k, Kt, K);
        on_units(left, both, deep + q, k, K, mV, R, -1);
        for (int64_t p = 0; p < panels; ++p)
            multiply<A>(k, vectors(p), q, Kt, right.at(p, deep), Um.at(p), right.at(p, deep + q), -1);
        copy_out<A>(k, q, K, state(GRAND_AVG));
        copy_out<A>(O, q, R, state(UNIT_AVG));
        unpack(k, right, deep + q, state(INPUT_AVG));
        for (int64_t j = 0; j < O * qp; ++j) mV.data[j] = -mV.data[j];
        for (int64_t j = 0; j < O * kp; ++j) new_U.data[j] = -new_U.data[j];
        pair_up(mV, new_U, left, both, deep);
        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            for (int64_t p = 0; p < panels; ++p) {
                fetch(m, top * I + p * PANEL<A>, n);
                multiply<A>(n, vectors(p), both, block(left, top, both), right.at(p), {}, part);
                for (int64_t i = 0; i < n; ++i) blend(m + (top + i) * I + p * PANEL<A>, part.at(i).data, width(p), 1, 1);
            }
        }
        return true;
    }

    // (unit means, U)ᵀ, block by block: the units that are processed together lie together.
    void pair_up(Place<const A> unit_means, Place<const A> U, A* left, int64_t rows, int64_t first = 0) const {
        for (int64_t top = 0; top < O; top += height) {
            const int64_t n = smaller(height, O - top);
            transpose<A>(n, q, unit_means.at(top), block(left, top, rows).at(first));
            transpose<A>(n, k, U.at(top), block(left, top, rows).at(first + q));
        }
    }
    Place<A> block(A* left, int64_t top, int64_t rows) const { return {left + top * rows, smaller(height, O - top)}; }

    // C = from + alpha Lᵀ B, with some rows of what `pair_up` has made, and all columns of B.
    void on_units(A* left, int64_t rows, int64_t first, int64_t terms, Place<const A> B, Place<const A> from, Place<A> C,
                  A alpha) const {
        for (int64_t top = 0; top < O; top += height)
            multiply<A>(smaller(height, O - top), B.row, terms, block(left, top, rows).at(first), B, from.at(top), C.at(top), alpha);
    }

    // A panel, up to the vector that has its last column.
    int64_t vectors(int64_t panel) const { return padded<A>(width(panel)); }

    // A panel of weightsᵀ · rows: `more` of it, or the first.
    void add(int64_t means, int64_t n, int64_t p, Place<const A> weights, Panels<A> rows, bool more, Panels<A> to) const {
        multiply<A>(means, vectors(p), n, weights, rows.at(p), more ? to.at(p) : Place<A>{}, to.at(p));
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
