// Both passes over one task, compiled once for every instruction set: VARIANT is the name of the one at hand.
//
//     AdaGrad   m = g                     r ← r + g²                  ζ = √r    z = √(r + ε)
//     Adam      m ← β₁ m + (1 − β₁) g     r ← β₂ r + (1 − β₂) g²      ζ = √r̂    z = ζ + ε
//
// m̂ and r̂ are m and r times a number per tensor. With r̂ = s² r, √r̂ + ε = s (√r + ε/s): ζ and z below are those of r
// itself with ε/s, and what is left of s is multiplied into the sums and the numbers of whole blocks.
//
// Sums run in lanes. Those of float end in double after a few additions each, so that their rounding errors do not grow
// with the block; lanes are added in order, so the same numbers always give the same sums.
#include <type_traits>

#include "passes.hpp"
#include "vector.hpp"

using namespace blockmean;

namespace {

constexpr int SHORT = 512 / VECTOR_BYTES;  // additions in float before a lane moves on to double
constexpr int AHEAD = 256;  // bytes: farther ahead, it would disturb the processor's own prefetching, which does more

template <class A> constexpr double SMALLEST = sizeof(A) == 8 ? 0x1p-1022 : 0x1p-126;  // normal number

template <class T> INLINE void prefetch(const T* p) { __builtin_prefetch(reinterpret_cast<const char*>(p) + AHEAD); }

// An average x ← β x + (1 − β) y as x + (1 − β)(y − x), or, where y weighs more, as y + β (x − y), as in torch's lerp: x − x
// must not leave rounding errors of a large x behind.
template <class A> struct Average {
    Vec<A> weight;
    bool is_short;  // its memory: y weighs at least as much as x

    explicit Average(double beta) : weight(fill<Vec<A>>(A(beta > 0.5 ? 1 - beta : -beta))), is_short(beta <= 0.5) {}
    ALWAYS Vec<A> operator()(Vec<A> x, Vec<A> y) const { return fma(weight, y - x, is_short ? y : x); }
};

// One step of one vector: its loads, its moments and its scales.
template <class T, bool ADAM> struct Entry {
    typedef typename Arithmetic<T>::type A;
    typedef Vec<A> V;
    static constexpr int W = Lanes<A>::W;

    typedef typename Lanes<A>::M M;

    double spread;  // s
    Average<A> average1, average2;
    V eps, weight_decay, shrink;  // shrink: −η · weight decay
    M flip;  // the sign bit if the gradient is to be negated
    bool careful, decays;  // careful: z can be zero
    T* param;
    const T* grad;
    A *first, *second;
    V p, g, m, r, zeta, z;
    A* kept;         // what `ByBlock` keeps of a block, W entries of m / z and of w in turn
    int64_t origin;  // and its first entry

    INLINE V all(double x) { return fill<V>(A(x)); }

    ALWAYS Entry(const Rule& rule, const Tensor& tensor)
        : spread(__builtin_sqrt(rule.gain_r)), average1(rule.beta1), average2(rule.beta2),
          eps(all(rule.eps / spread)), weight_decay(all(rule.weight_decay)), shrink(all(-rule.rate * rule.weight_decay)),
          flip(bits<M>(all(rule.sign < 0 ? -0.0 : 0.0))), careful(rule.eps / spread < SMALLEST<A>),
          decays(rule.weight_decay != 0), param(reinterpret_cast<T*>(tensor.param)),
          grad(reinterpret_cast<const T*>(tensor.grad)), first(reinterpret_cast<A*>(tensor.first)),
          second(reinterpret_cast<A*>(tensor.second)) {}

    // The gradient after sign and weight decay; with `update` also the parameter, which then is needed in any case.
    template <bool PART> ALWAYS void read_gradient(int64_t i, int n, bool update) {
        if (!PART) {
            prefetch(grad + i);
            if (update) prefetch(param + i);
        }
        g = bits<V>(bits<M>(PART ? load(grad + i, n) : load(grad + i)) ^ flip);
        if (update || (decays && !ADAM)) p = PART ? load(param + i, n) : load(param + i);
        if (decays && !ADAM) g = fma(weight_decay, p, g);
    }
    template <bool PART> ALWAYS void read_moments(int64_t i, int n) {
        if (!PART) {
            prefetch(second + i);
            if (ADAM) prefetch(first + i);
        }
        r = PART ? load(second + i, n) : load(second + i);
        if (ADAM) {
            m = PART ? load(first + i, n) : load(first + i);
            m = average1(m, g);
            r = average2(r, g * g);
        } else {
            m = g;
            r = fma(g, g, r);
        }
    }
    template <bool PART> ALWAYS void write_moments(int64_t i, int n) {
        PART ? store(second + i, r, n) : store(second + i, r);
        if (ADAM) PART ? store(first + i, m, n) : store(first + i, m);
    }
    template <bool WITH_ZETA> ALWAYS void scale() {
        if (ADAM) {
            zeta = root(r);
            z = zeta + eps;
        } else {
            if (WITH_ZETA) zeta = root(r);
            z = root(r + eps);
        }
    }
    ALWAYS void mask() {  // no step where z is zero
        if (careful) z = z == 0 ? fill<V>(A(__builtin_inf())) : z;
    }
    ALWAYS V roots() { return twice_inverse_root(z, careful); }  // 2 z^-½
    // 4 m / z. In single precision by two products, to four units in the last place: a division takes longer.
    ALWAYS V quotient(V q) { return sizeof(A) == sizeof(double) ? m / z * A(4) : m * q * q; }
};

// With KEEP, moments are written at once, and m / z and w of every entry of a block are kept for `ByBlock`.
template <class T, bool ADAM, Sums SUMS, bool KEEP = false> struct Pass1 {
    typedef Entry<T, ADAM> E;
    typedef typename E::A A;
    typedef Vec<A> V;
    static constexpr int W = E::W, R = ROWS[SUMS];
    static constexpr int FIRST = KEEP ? 2 : 0;  // sums over gradients are known by then

    // What W entries from i add to every row; lanes from n are zero.
    template <bool PART> INLINE void contribute(E& e, int64_t i, int n, V (&out)[R]) {
        e.template read_gradient<PART>(i, n, false);
        if constexpr (KEEP && !PART) __builtin_prefetch(e.param + i);
        out[0] = e.g;
        if constexpr (SUMS == SQUARES || SUMS >= WEIGHTED) out[1] = e.g * e.g;
        if constexpr (SUMS >= PAPER) {
            e.template read_moments<PART>(i, n);
            e.template scale<(SUMS >= WEIGHTED)>();
        }
        if constexpr (SUMS == PAPER || SUMS == CONSISTENT) {
            out[1] = e.z;
            if constexpr (SUMS == CONSISTENT) {
                e.mask();
                out[2] = e.roots() * e.m;
            }
        }
        if constexpr (SUMS >= WEIGHTED) {
            e.mask();
            V q = e.roots(), w = e.zeta * q, step;
            out[2] = e.r;
            out[3] = w * e.m;
            if constexpr (SUMS == CAPPED || KEEP) step = e.quotient(q);
            if constexpr (SUMS == CAPPED) {
                out[4] = step * step;
                out[5] = w * w;
            }
            if constexpr (KEEP) {
                e.template write_moments<PART>(i, n);
                store(e.kept + 2 * (i - e.origin), step);
                store(e.kept + 2 * (i - e.origin) + W, w);
            }
        }
        if constexpr (PART) {
            for (int k = 0; k < R; ++k) out[k] = first_lanes<A>(n) ? out[k] : V{};
        }
    }

    // What is the same for all entries of a tensor: debiasing, r̂ and m̂ instead of r and m, and the 2 of `roots`.
    INLINE double factor(const E& e, const Rule& rule, int k) {
        if (SUMS < WEIGHTED) return k == 2 ? 0.5 : 1;
        const double step = rule.gain / e.spread / 4;
        return k == 2 ? rule.gain_r : k == 3 ? rule.gain * __builtin_sqrt(e.spread) / 2
             : k == 4 ? step * step : k == 5 ? e.spread / 4 : 1;
    }

    // As many entries of a run, from i on, as float may add up.
    INLINE void chunk(E& e, int64_t& i, int64_t end, Total<A> (&totals)[R]) {
        V x[R];
        if (end - i >= W) {
            V lanes[R] = {};
            const int64_t stop = end - i >= SHORT * W ? i + SHORT * W : end - (end - i) % W;
            for (; i < stop; i += W) {
                contribute<false>(e, i, W, x);
                for (int k = FIRST; k < R; ++k) lanes[k] += x[k];
            }
            for (int k = FIRST; k < R; ++k) totals[k].add(lanes[k]);
        } else {
            contribute<true>(e, i, int(end - i), x);
            for (int k = FIRST; k < R; ++k) totals[k].add(x[k]);
            i = end;
        }
    }

    static void sums(const Rule& rule, const Task& task) {
        const Tensor& tensor = *task.tensor;
        E e(rule, tensor);
        const int64_t row = tensor.blocks * tensor.inner, step = tensor.inner == 1 ? W : tensor.inner;
        for (int64_t o = 0; o < tensor.outer; ++o) {
            double* at = task.out;
            for (int64_t j = task.begin; j < task.end; j += step) {
                const int64_t first = o * row + j, left = task.end - j;
                if (tensor.inner == 1) {  // neighbours belong to different blocks
                    const int n = left >= W ? W : int(left);
                    V x[R];
                    n == W ? contribute<false>(e, first, n, x) : contribute<true>(e, first, n, x);
                    for (int k = 0; k < R; ++k)
                        for (int l = 0; l < n; ++l) add(at[k * task.stride + l], double(x[k][l]) * factor(e, rule, k), o);
                    at += n;
                } else {
                    Total<A> totals[R];
                    for (int64_t i = first, end = first + (left < step ? left : step); i < end;) chunk(e, i, end, totals);
                    for (int k = 0; k < R; ++k) add(at[k * task.stride], totals[k].sum() * factor(e, rule, k), o);
                    at += 1;
                }
            }
        }
    }
    INLINE void add(double& out, double x, int64_t o) { out = o ? out + x : x; }
};

template <class T, bool ADAM, Sums SUMS> struct Pass2 {  // GRADIENT: no correction; PAPER: w = z^-½; WEIGHTED: w = ζ z^-½
    typedef Entry<T, ADAM> E;
    typedef typename E::A A;
    typedef Vec<A> V;
    static constexpr int W = E::W;

    // θ ← θ + κ m/z + w c, with all numbers of the step multiplied into κ and c.
    template <bool PART> INLINE void update(E& e, int64_t i, int n, V c, V kappa) {
        e.template read_gradient<PART>(i, n, true);
        e.template read_moments<PART>(i, n);
        e.template write_moments<PART>(i, n);
        e.template scale<(SUMS == WEIGHTED)>();
        e.mask();
        V p;
        if constexpr (SUMS == GRADIENT) {
            p = move(e, e.m / e.z * kappa);
        } else {
            V q = e.roots(), w = SUMS == WEIGHTED ? e.zeta * q : q;
            p = move(e, fma(w, c, e.quotient(q) * kappa));
        }
        PART ? store(e.param + i, p, n) : store(e.param + i, p);
    }
    // θ + step, and decoupled weight decay: rounded once.
    INLINE V move(E& e, V step) { return e.p + (ADAM && e.decays ? fma(e.shrink, e.p, step) : step); }

    INLINE void walk(E& e, int64_t i, int64_t end, V c, V kappa) {
        for (; end - i >= W; i += W) update<false>(e, i, W, c, kappa);
        if (i < end) update<true>(e, i, int(end - i), c, kappa);
    }

    // What the numbers of blocks are multiplied by: −η, what debiasing leaves, and the inverse of the 2 of `roots`.
    INLINE double of_c(const E& e, const Rule& rule) { return -rule.rate * __builtin_sqrt(e.spread) / 2; }
    INLINE double of_kappa(const E& e, const Rule& rule) {
        return -rule.rate * rule.gain / e.spread / (SUMS == GRADIENT ? 1 : 4);
    }

    INLINE V gather(const double* values, int n, double other, double factor) {
        V x;
        for (int l = 0; l < W; ++l) x[l] = A((values && l < n ? values[l] : other) * factor);
        return x;
    }

    static void apply(const Rule& rule, const Task& task, const double* c, const double* kappa) {
        const Tensor& tensor = *task.tensor;
        E e(rule, tensor);
        const int64_t row = tensor.blocks * tensor.inner;
        const double for_c = of_c(e, rule), for_kappa = of_kappa(e, rule);
        for (int64_t o = 0; o < tensor.outer; ++o) {
            if (SUMS == GRADIENT) {  // blocks play no part
                walk(e, o * row + task.begin, o * row + task.end, V{}, E::all(for_kappa));
            } else if (tensor.inner == 1) {
                for (int64_t j = task.begin; j < task.end; j += W) {
                    const int n = task.end - j >= W ? W : int(task.end - j);
                    V own = gather(c + j, n, 0, for_c), factor = gather(kappa ? kappa + j : nullptr, n, 1, for_kappa);
                    n == W ? update<false>(e, o * row + j, n, own, factor) : update<true>(e, o * row + j, n, own, factor);
                }
            } else {
                int64_t block = task.begin / tensor.inner;
                for (int64_t j = task.begin; j < task.end; j += tensor.inner, ++block) {
                    V own = E::all(c[block] * for_c), factor = E::all((kappa ? kappa[block] : 1.0) * for_kappa);
                    const int64_t end = j + tensor.inner < task.end ? j + tensor.inner : task.end;
                    walk(e, o * row + j, o * row + end, own, factor);
                }
            }
        }
    }
};

// What is left of the sums, the solve and the update, block by block, while a block is in the cache. The solve is that of
// correction.py for blocks that are not coupled.
template <class T, bool ADAM> struct ByBlock {
    typedef Pass1<T, ADAM, WEIGHTED, true> First;
    typedef Pass2<T, ADAM, WEIGHTED> Second;
    typedef typename First::E E;
    typedef typename E::A A;
    typedef Vec<A> V;
    static constexpr int W = E::W;

    template <bool PART> INLINE void update(E& e, int64_t i, int n, V c, V kappa) {
        e.p = PART ? load(e.param + i, n) : load(e.param + i);
        const A* kept = e.kept + 2 * (i - e.origin);
        V p = Second::move(e, fma(load(kept + W), c, load(kept) * kappa));  // bit by bit what `Second` does
        PART ? store(e.param + i, p, n) : store(e.param + i, p);
    }

    static void run(const Rule& rule, const Task& task, double* U, double* energy) {
        alignas(64) A kept[2 * (CACHED_BYTES / sizeof(A) + W)];
        const Tensor& tensor = *task.tensor;
        E e(rule, tensor);
        e.kept = kept;
        const double for_c = Second::of_c(e, rule), for_kappa = Second::of_kappa(e, rule);
        const double size = double(tensor.inner);
        const double keep = ADAM ? rule.beta2 : 1, add = ADAM ? 1 - rule.beta2 : 1;
        const int64_t block = task.begin / tensor.inner;
        double* out = task.out;
        U += block, energy += block;
        for (int64_t i = task.begin; i < task.end; i += tensor.inner, ++out, ++U, ++energy) {
            const int64_t end = i + tensor.inner;
            Total<A> totals[First::R];
            e.origin = i;
            for (int64_t j = i; j < end;) First::chunk(e, j, end, totals);
            const double square = totals[2].sum() * First::factor(e, rule, 2);  // Σ ζ²
            const double b = totals[3].sum() * First::factor(e, rule, 3);
            *U = keep * *U + add * (out[0] * out[0]);
            *energy = keep * *energy + add * out[task.stride];
            const double ratio = square > 0 && *energy > 0 ? *U / *energy : 1;  // A_ii
            const double root = 1 / __builtin_sqrt(ratio > rule.floor ? ratio : rule.floor) - 1;
            double kappa = 1;
            if (ADAM && size > 1) {
                const double lambda = (size - (ratio > 1 ? ratio : 1)) / (size - 1);
                kappa = 1 / __builtin_sqrt(lambda > rule.smallest_lambda ? lambda : rule.smallest_lambda);
            }
            if (square == __builtin_inf()) continue;  // z is infinite: no step
            const double common = square > 0 ? b / __builtin_sqrt(square) : 0;
            out[2 * task.stride] = common;
            out[3 * task.stride] = root * common;
            const double c = square > 0 ? b / square * (root + (1 - kappa)) : 0;
            const V for_w = E::all(c * for_c), for_m = E::all(kappa * for_kappa);
            int64_t j = i;
            for (; end - j >= W; j += W) update<false>(e, j, W, for_w, for_m);
            if (j < end) update<true>(e, j, int(end - j), for_w, for_m);
        }
    }
};

// ------------------------------------------------------------------ the choice at run time

// f(T{}, Adam{}) for the storage type of a dtype and the recurrence of a rule.
template <class F> void choose(const Rule& rule, F f) {
    typedef std::true_type Adam;
    typedef std::false_type AdaGrad;
    switch (rule.dtype) {
        case FLOAT64: return rule.adam ? f(double{}, Adam{}) : f(double{}, AdaGrad{});
        case BFLOAT16: return rule.adam ? f(bfloat16{}, Adam{}) : f(bfloat16{}, AdaGrad{});
        case FLOAT16: return rule.adam ? f(float16{}, Adam{}) : f(float16{}, AdaGrad{});
        default: return rule.adam ? f(float{}, Adam{}) : f(float{}, AdaGrad{});
    }
}

void sums(const Rule& rule, const Task& task) {
    choose(rule, [&](auto t, auto adam) {
        typedef decltype(t) T;
        constexpr bool ADAM = decltype(adam)::value;
        if constexpr (!ADAM) {  // Adam has weighted forms only
            if (rule.sums == PAPER) return Pass1<T, ADAM, PAPER>::sums(rule, task);
            if (rule.sums == CONSISTENT) return Pass1<T, ADAM, CONSISTENT>::sums(rule, task);
        }
        if (rule.sums == SQUARES) return Pass1<T, ADAM, SQUARES>::sums(rule, task);  // what `by_block` needs
        if (rule.sums == GRADIENT) return Pass1<T, ADAM, GRADIENT>::sums(rule, task);
        if (rule.sums == WEIGHTED) return Pass1<T, ADAM, WEIGHTED>::sums(rule, task);
        return Pass1<T, ADAM, CAPPED>::sums(rule, task);
    });
}

void apply(const Rule& rule, const Task& task, const double* c, const double* kappa) {
    choose(rule, [&](auto t, auto adam) {
        typedef decltype(t) T;
        constexpr bool ADAM = decltype(adam)::value;
        if (!c) return Pass2<T, ADAM, GRADIENT>::apply(rule, task, c, kappa);
        if constexpr (!ADAM) {
            if (rule.sums < WEIGHTED) return Pass2<T, ADAM, PAPER>::apply(rule, task, c, kappa);
        }
        return Pass2<T, ADAM, WEIGHTED>::apply(rule, task, c, kappa);
    });
}

void by_block(const Rule& rule, const Task& task, double* U, double* energy) {
    choose(rule, [&](auto t, auto adam) {
        ByBlock<decltype(t), decltype(adam)::value>::run(rule, task, U, energy);
    });
}

}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

extern const Kernels blockmean::JOIN(kernels_, VARIANT) = {TEXT(VARIANT), sums, apply, by_block};
