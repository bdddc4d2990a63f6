// Both passes over one task, compiled once for every instruction set: VARIANT is the name of the one at hand.
//
//     AdaGrad   m = g                     r ← r + g²                  ζ = √r    z = √(r + ε)
//     Adam      m ← m + (1 − β₁)(g − m)   r ← β₂ r + (1 − β₂) g²      ζ = √r̂    z = ζ + ε
//
// Sums run in lanes. Those of float end in double after a few additions each, so that their rounding errors do not grow
// with the block; lanes are added in order, so the same numbers always give the same sums.
#include "passes.hpp"
#include "vector.hpp"

using namespace blockmean;

namespace {

constexpr int SHORT = 32;  // additions in float before a lane moves on to double
constexpr int AHEAD = 1024;  // bytes: asking for memory that early makes large lists a tenth faster

constexpr bool LINE = VECTOR_BYTES >= 64;  // whether a vector fills a line of the cache

template <class T> INLINE void prefetch(const T* p) { __builtin_prefetch(reinterpret_cast<const char*>(p) + AHEAD); }

// One step of one vector: its loads, its moments and its scales.
template <class T, bool ADAM> struct Entry {
    typedef typename Arithmetic<T>::type A;
    typedef Vec<A> V;
    static constexpr int W = Lanes<A>::W;

    V decay1, beta2, decay2, eps, weight_decay, sign, gain, gain_root, rate;  // decay: 1 − β
    bool careful, decays;
    T* param;
    const T* grad;
    A *first, *second;
    V p, g, m, r, zeta, z;

    INLINE V all(double x) { return fill<V>(A(x)); }

    ALWAYS Entry(const Rule& rule, const Piece& piece)
        : decay1(all(1 - rule.beta1)), beta2(all(rule.beta2)), decay2(all(1 - rule.beta2)), eps(all(rule.eps)),
          weight_decay(all(rule.weight_decay)), sign(all(rule.sign)), gain(all(piece.gain)),
          gain_root(all(__builtin_sqrt(piece.gain_r))), rate(all(-piece.rate)), careful(rule.careful),
          decays(rule.weight_decay != 0), param(reinterpret_cast<T*>(piece.param)),
          grad(reinterpret_cast<const T*>(piece.grad)), first(reinterpret_cast<A*>(piece.first)),
          second(reinterpret_cast<A*>(piece.second)) {}

    // The gradient after sign and weight decay; with `update` also the parameter, which then is needed in any case.
    template <bool PART, bool FETCH> ALWAYS void read_gradient(int64_t i, int n, bool update) {
        if (FETCH) {
            prefetch(grad + i);
            if (update) prefetch(param + i);
        }
        g = (PART ? load(grad + i, n) : load(grad + i)) * sign;
        if (update || (decays && !ADAM)) p = PART ? load(param + i, n) : load(param + i);
        if (decays && !ADAM) g = fma(weight_decay, p, g);
    }
    template <bool PART, bool FETCH> ALWAYS void read_moments(int64_t i, int n) {
        if (FETCH) {
            prefetch(second + i);
            if (ADAM) prefetch(first + i);
        }
        r = PART ? load(second + i, n) : load(second + i);
        if (ADAM) {
            m = PART ? load(first + i, n) : load(first + i);
            m = fma(decay1, g - m, m);
            r = fma(decay2, g * g, r * beta2);
        } else {
            m = g;
            r = fma(g, g, r);
        }
    }
    template <bool WITH_ZETA> ALWAYS void scale() {
        if (ADAM) {
            zeta = root(r) * gain_root;
            z = zeta + eps;
        } else {
            if (WITH_ZETA) zeta = root(r);
            z = root(r + eps);
        }
    }
    ALWAYS void mask() {  // no step where z is zero
        if (careful) z = z == 0 ? fill<V>(A(__builtin_inf())) : z;
    }
    ALWAYS V unweighted() { return inverse_root(z, careful); }
};

template <class T, bool ADAM, Sums SUMS> struct Pass1 {
    typedef Entry<T, ADAM> E;
    typedef typename E::A A;
    typedef Vec<A> V;
    static constexpr int W = E::W, R = ROWS[SUMS];

    // What W entries from i add to every row; lanes from n are zero.
    template <bool PART, bool FETCH = !PART> INLINE void contribute(E& e, int64_t i, int n, V (&out)[R]) {
        e.template read_gradient<PART, FETCH>(i, n, false);
        out[0] = e.g;
        if constexpr (SUMS != GRADIENT) {
            e.template read_moments<PART, FETCH>(i, n);
            e.template scale<(SUMS >= WEIGHTED)>();
        }
        if constexpr (SUMS == PAPER || SUMS == CONSISTENT) {
            out[1] = e.z;
            if constexpr (SUMS == CONSISTENT) {
                e.mask();
                out[2] = e.unweighted() * e.m;
            }
        }
        if constexpr (SUMS >= WEIGHTED) {
            e.mask();
            V w = e.zeta * e.unweighted();
            out[1] = e.g * e.g;
            out[2] = e.r;
            out[3] = w * e.m;
            if constexpr (SUMS == CAPPED) {
                V step = e.m / e.z;
                out[4] = step * step;
                out[5] = w * w;
            }
        }
        if constexpr (PART) {
            for (int k = 0; k < R; ++k) out[k] = first_lanes<A>(n) ? out[k] : V{};
        }
    }

    // Debiasing, which is the same for all entries of a tensor: r̂ and m̂ instead of r and m.
    INLINE double factor(const Piece& piece, int k) {
        if (SUMS < WEIGHTED) return 1;
        return k == 2 ? piece.gain_r : k == 3 ? piece.gain : k == 4 ? piece.gain * piece.gain : 1;
    }

    // Sums over one run of entries of a single block.
    INLINE void run(E& e, int64_t begin, int64_t end, double (&out)[R]) {
        Total<A> totals[R];
        int64_t i = begin;
        while (end - i >= W) {
            V lanes[R] = {}, x[R];
            int64_t stop = end - i >= SHORT * W ? i + SHORT * W : end - (end - i) % W;
            for (; i + 2 * W <= stop; i += 2 * W) {  // together they take one line of the cache, fetched once
                contribute<false>(e, i, W, x);
                for (int k = 0; k < R; ++k) lanes[k] += x[k];
                contribute<false, LINE>(e, i + W, W, x);
                for (int k = 0; k < R; ++k) lanes[k] += x[k];
            }
            if (i < stop) {
                contribute<false>(e, i, W, x);
                for (int k = 0; k < R; ++k) lanes[k] += x[k];
                i += W;
            }
            for (int k = 0; k < R; ++k) totals[k].add(lanes[k]);
        }
        if (i < end) {
            V x[R];
            contribute<true>(e, i, int(end - i), x);
            for (int k = 0; k < R; ++k) totals[k].add(x[k]);
        }
        for (int k = 0; k < R; ++k) out[k] = totals[k].sum();
    }

    static void sums(const Rule& rule, const Piece& piece, const Task& task, double* out, int64_t stride) {
        E e(rule, piece);
        const int64_t row = piece.blocks * piece.inner, step = piece.inner == 1 ? W : piece.inner;
        for (int64_t o = 0; o < piece.outer; ++o) {
            double* at = out;
            for (int64_t j = task.begin; j < task.end; j += step) {
                if (piece.inner == 1) {  // neighbours belong to different blocks
                    const int n = task.end - j >= W ? W : int(task.end - j);
                    V x[R];
                    n == W ? contribute<false>(e, o * row + j, n, x) : contribute<true>(e, o * row + j, n, x);
                    for (int k = 0; k < R; ++k) {
                        const double f = factor(piece, k);
                        for (int l = 0; l < n; ++l) {
                            double own = double(x[k][l]) * f;
                            at[k * stride + l] = o ? at[k * stride + l] + own : own;
                        }
                    }
                    at += n;
                } else {
                    double own[R];
                    run(e, o * row + j, o * row + (j + step < task.end ? j + step : task.end), own);
                    for (int k = 0; k < R; ++k) {
                        own[k] *= factor(piece, k);
                        at[k * stride] = o ? at[k * stride] + own[k] : own[k];
                    }
                    at += 1;
                }
            }
        }
    }
};

template <class T, bool ADAM, Sums SUMS> struct Pass2 {  // GRADIENT: no correction; PAPER: w = z^-½; WEIGHTED: w = ζ z^-½
    typedef Entry<T, ADAM> E;
    typedef typename E::A A;
    typedef Vec<A> V;
    static constexpr int W = E::W;

    // θ ← θ − η (κ m̂/z + w c), with κ multiplied by the factor m̂ / m.
    template <bool PART, bool FETCH = !PART> INLINE void update(E& e, int64_t i, int n, V c, V kappa) {
        e.template read_gradient<PART, FETCH>(i, n, true);
        e.template read_moments<PART, FETCH>(i, n);
        PART ? store(e.second + i, e.r, n) : store(e.second + i, e.r);
        if (ADAM) PART ? store(e.first + i, e.m, n) : store(e.first + i, e.m);
        e.template scale<(SUMS == WEIGHTED)>();
        e.mask();
        V delta = e.m / e.z * kappa;
        if constexpr (SUMS == PAPER) delta = fma(e.unweighted(), c, delta);
        if constexpr (SUMS == WEIGHTED) delta = fma(e.zeta * e.unweighted(), c, delta);
        if (ADAM && e.decays) delta = fma(e.weight_decay, e.p, delta);
        V p = fma(e.rate, delta, e.p);
        PART ? store(e.param + i, p, n) : store(e.param + i, p);
    }

    INLINE void walk(E& e, int64_t i, int64_t end, V c, V kappa) {
        for (; end - i >= 2 * W; i += 2 * W) {
            update<false>(e, i, W, c, kappa);
            update<false, LINE>(e, i + W, W, c, kappa);
        }
        if (end - i >= W) {
            update<false>(e, i, W, c, kappa);
            i += W;
        }
        if (i < end) update<true>(e, i, int(end - i), c, kappa);
    }

    INLINE V gather(const double* values, int n, double other) {
        V x;
        for (int l = 0; l < W; ++l) x[l] = A(values && l < n ? values[l] : other);
        return x;
    }

    static void apply(const Rule& rule, const Piece& piece, const Task& task, const double* c, const double* kappa) {
        E e(rule, piece);
        const int64_t row = piece.blocks * piece.inner;
        if (SUMS == GRADIENT) {  // blocks play no part
            for (int64_t o = 0; o < piece.outer; ++o) {
                int64_t i = o * row + task.begin, end = o * row + task.end;
                walk(e, i, end, V{}, e.gain);
            }
            return;
        }
        for (int64_t o = 0; o < piece.outer; ++o) {
            if (piece.inner == 1) {
                for (int64_t j = task.begin; j < task.end; j += W) {
                    const int n = task.end - j >= W ? W : int(task.end - j);
                    V own = gather(c + j, n, 0), factor = gather(kappa ? kappa + j : nullptr, n, 1) * e.gain;
                    n == W ? update<false>(e, o * row + j, n, own, factor) : update<true>(e, o * row + j, n, own, factor);
                }
                continue;
            }
            int64_t block = task.begin / piece.inner;
            for (int64_t j = task.begin; j < task.end; j += piece.inner, ++block) {
                V own = E::all(c[block]), factor = E::all(kappa ? kappa[block] : 1.0) * e.gain;
                int64_t i = o * row + j, end = o * row + (j + piece.inner < task.end ? j + piece.inner : task.end);
                walk(e, i, end, own, factor);
            }
        }
    }
};

// ------------------------------------------------------------------ the choice at run time

template <class T, bool ADAM> void sums_of(const Rule& r, const Piece& p, const Task& t, double* out, int64_t stride) {
    if constexpr (!ADAM) {  // Adam has weighted forms only
        if (r.sums == PAPER) return Pass1<T, ADAM, PAPER>::sums(r, p, t, out, stride);
        if (r.sums == CONSISTENT) return Pass1<T, ADAM, CONSISTENT>::sums(r, p, t, out, stride);
    }
    if (r.sums == GRADIENT) return Pass1<T, ADAM, GRADIENT>::sums(r, p, t, out, stride);
    if (r.sums == WEIGHTED) return Pass1<T, ADAM, WEIGHTED>::sums(r, p, t, out, stride);
    return Pass1<T, ADAM, CAPPED>::sums(r, p, t, out, stride);
}

template <class T, bool ADAM>
void apply_to(const Rule& r, const Piece& p, const Task& t, const double* c, const double* kappa) {
    if (!c || r.sums == GRADIENT) return Pass2<T, ADAM, GRADIENT>::apply(r, p, t, c, kappa);
    if constexpr (!ADAM) {
        if (r.sums < WEIGHTED) return Pass2<T, ADAM, PAPER>::apply(r, p, t, c, kappa);
    }
    return Pass2<T, ADAM, WEIGHTED>::apply(r, p, t, c, kappa);
}

void sums(const Rule& r, const Piece& p, const Task& t, double* out, int64_t stride) {
    switch (p.dtype) {
        case FLOAT64: return (r.adam ? sums_of<double, true> : sums_of<double, false>)(r, p, t, out, stride);
        case BFLOAT16: return (r.adam ? sums_of<bfloat16, true> : sums_of<bfloat16, false>)(r, p, t, out, stride);
        case FLOAT16: return (r.adam ? sums_of<float16, true> : sums_of<float16, false>)(r, p, t, out, stride);
        default: return (r.adam ? sums_of<float, true> : sums_of<float, false>)(r, p, t, out, stride);
    }
}

void apply(const Rule& r, const Piece& p, const Task& t, const double* c, const double* kappa) {
    switch (p.dtype) {
        case FLOAT64: return (r.adam ? apply_to<double, true> : apply_to<double, false>)(r, p, t, c, kappa);
        case BFLOAT16: return (r.adam ? apply_to<bfloat16, true> : apply_to<bfloat16, false>)(r, p, t, c, kappa);
        case FLOAT16: return (r.adam ? apply_to<float16, true> : apply_to<float16, false>)(r, p, t, c, kappa);
        default: return (r.adam ? apply_to<float, true> : apply_to<float, false>)(r, p, t, c, kappa);
    }
}

}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

extern const Kernels blockmean::JOIN(kernels_, VARIANT) = {TEXT(VARIANT), sums, apply};
