// Both passes over one task, compiled once for every instruction set: VARIANT is the name of the one at hand.
//
//     AdaGrad   m = g                     r ← r + g²                  ζ = √r    z = √(r + ε)
//     Adam      m ← m + (1 − β₁)(g − m)   r ← β₂ r + (1 − β₂) g²      ζ = √r̂    z = ζ + ε
//
// m̂ and r̂ are m and r times a number per tensor. With r̂ = s² r, √r̂ + ε = s (√r + ε/s): ζ and z below are those of r
// itself with ε/s, and what is left of s is multiplied into the sums and the numbers of whole blocks.
//
// Sums run in lanes. Those of float end in double after a few additions each, so that their rounding errors do not grow
// with the block; lanes are added in order, so the same numbers always give the same sums.
#include "passes.hpp"
#include "vector.hpp"

using namespace blockmean;

namespace {

constexpr int SHORT = 32;  // additions in float before a lane moves on to double
// The same where tasks take turns, 512 bytes of each array. Whether they do depends on the list: so may the last bits.
constexpr int TURN = 512 / VECTOR_BYTES;
constexpr int AHEAD = 256;  // bytes: farther ahead, it would disturb the processor's own prefetching, which does more

constexpr bool LINE = VECTOR_BYTES >= 64;  // whether a vector fills a line of the cache

template <class A> constexpr double SMALLEST = sizeof(A) == 8 ? 0x1p-1022 : 0x1p-126;  // normal number

template <class T> INLINE void prefetch(const T* p) { __builtin_prefetch(reinterpret_cast<const char*>(p) + AHEAD); }

// One step of one vector: its loads, its moments and its scales.
template <class T, bool ADAM> struct Entry {
    typedef typename Arithmetic<T>::type A;
    typedef Vec<A> V;
    static constexpr int W = Lanes<A>::W;

    typedef typename Lanes<A>::M M;

    double spread;  // s
    V decay1, decay2, eps, weight_decay, shrink;  // decay: 1 − β; shrink: −η · weight decay
    M flip;  // the sign bit if the gradient is to be negated
    bool careful, decays;
    T* param;
    const T* grad;
    A *first, *second;
    V p, g, m, r, zeta, z;
    A* kept;         // what `Local` keeps of a block, W entries of m / z and of w in turn
    int64_t origin;  // and its first entry

    INLINE V all(double x) { return fill<V>(A(x)); }

    ALWAYS Entry(const Rule& rule, const Piece& piece)
        : spread(__builtin_sqrt(piece.gain_r)), decay1(all(1 - rule.beta1)), decay2(all(1 - rule.beta2)), eps(all(rule.eps / spread)), weight_decay(all(rule.weight_decay)),
          shrink(all(-piece.rate * rule.weight_decay)), flip(bits<M>(all(rule.sign < 0 ? -0.0 : 0.0))),
          careful(rule.careful || rule.eps / spread < SMALLEST<A>), decays(rule.weight_decay != 0), param(reinterpret_cast<T*>(piece.param)),
          grad(reinterpret_cast<const T*>(piece.grad)), first(reinterpret_cast<A*>(piece.first)),
          second(reinterpret_cast<A*>(piece.second)) {}

    // The gradient after sign and weight decay; with `update` also the parameter, which then is needed in any case.
    template <bool PART, bool FETCH> ALWAYS void read_gradient(int64_t i, int n, bool update) {
        if (FETCH) {
            prefetch(grad + i);
            if (update) prefetch(param + i);
        }
        g = bits<V>(bits<M>(PART ? load(grad + i, n) : load(grad + i)) ^ flip);
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
            r = fma(decay2, g * g - r, r);
        } else {
            m = g;
            r = fma(g, g, r);
        }
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

// With KEEP, moments are written at once, and m / z and w of every entry of a block are kept for `Local`.
template <class T, bool ADAM, Sums SUMS, bool KEEP = false> struct Pass1 {
    typedef Entry<T, ADAM> E;
    typedef typename E::A A;
    typedef Vec<A> V;
    static constexpr int W = E::W, R = ROWS[SUMS];
    static constexpr int FIRST = KEEP ? 2 : 0;  // sums over gradients are known by then

    // What W entries from i add to every row; lanes from n are zero.
    template <bool PART, bool FETCH = !PART> INLINE void contribute(E& e, int64_t i, int n, V (&out)[R]) {
        e.template read_gradient<PART, FETCH>(i, n, false);
        if constexpr (KEEP && FETCH) __builtin_prefetch(e.param + i);
        out[0] = e.g;
        if constexpr (SUMS == SQUARES) out[1] = e.g * e.g;
        if constexpr (SUMS >= PAPER) {
            e.template read_moments<PART, FETCH>(i, n);
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
            out[1] = e.g * e.g;
            out[2] = e.r;
            out[3] = w * e.m;
            if constexpr (SUMS == CAPPED || KEEP) step = e.quotient(q);
            if constexpr (SUMS == CAPPED) {
                out[4] = step * step;
                out[5] = w * w;
            }
            if constexpr (KEEP) {
                PART ? store(e.second + i, e.r, n) : store(e.second + i, e.r);
                if (ADAM) PART ? store(e.first + i, e.m, n) : store(e.first + i, e.m);
                store(e.kept + 2 * (i - e.origin), step);
                store(e.kept + 2 * (i - e.origin) + W, w);
            }
        }
        if constexpr (PART) {
            for (int k = 0; k < R; ++k) out[k] = first_lanes<A>(n) ? out[k] : V{};
        }
    }

    // What is the same for all entries of a tensor: debiasing, r̂ and m̂ instead of r and m, and the 2 of `roots`.
    INLINE double factor(const E& e, const Piece& piece, int k) {
        if (SUMS < WEIGHTED) return k == 2 ? 0.5 : 1;
        const double step = piece.gain / e.spread / 4;
        return k == 2 ? piece.gain_r : k == 3 ? piece.gain * __builtin_sqrt(e.spread) / 2
             : k == 4 ? step * step : k == 5 ? e.spread / 4 : 1;
    }

    // As many entries of a run, from i on, as float may add up.
    template <int MOST = SHORT> INLINE void chunk(E& e, int64_t& i, int64_t end, Total<A> (&totals)[R]) {
        V x[R];
        if (end - i >= W) {
            V lanes[R] = {};
            const int64_t stop = end - i >= MOST * W ? i + MOST * W : end - (end - i) % W;
            for (; i + 2 * W <= stop; i += 2 * W) {  // together they take one line of the cache, fetched once
                contribute<false>(e, i, W, x);
                for (int k = FIRST; k < R; ++k) lanes[k] += x[k];
                contribute<false, LINE>(e, i + W, W, x);
                for (int k = FIRST; k < R; ++k) lanes[k] += x[k];
            }
            if (i < stop) {
                contribute<false>(e, i, W, x);
                for (int k = FIRST; k < R; ++k) lanes[k] += x[k];
                i += W;
            }
            for (int k = FIRST; k < R; ++k) totals[k].add(lanes[k]);
        } else {
            contribute<true>(e, i, int(end - i), x);
            for (int k = FIRST; k < R; ++k) totals[k].add(x[k]);
            i = end;
        }
    }

    // Sums over one run of entries of a single block.
    INLINE void run(E& e, int64_t i, int64_t end, double (&out)[R]) {
        Total<A> totals[R];
        while (i < end) chunk(e, i, end, totals);
        for (int k = FIRST; k < R; ++k) out[k] = totals[k].sum();
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
                        const double f = factor(e, piece, k);
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
                        own[k] *= factor(e, piece, k);
                        at[k * stride] = o ? at[k * stride] + own[k] : own[k];
                    }
                    at += 1;
                }
            }
        }
    }
};

// What `sums` does for one task, chunk by chunk, so that several tasks can take turns.
template <class T, bool ADAM, Sums SUMS> struct Stream {
    typedef Pass1<T, ADAM, SUMS> First;
    static constexpr int MOST = SUMS == SQUARES ? SHORT : TURN;  // squares are to be those of WEIGHTED bit by bit
    typename First::E e;
    const Piece& piece;
    int64_t i, left;  // the next entry, and the entries of the block that are left
    const int64_t end;
    Total<typename First::A> totals[First::R];
    double* out;

    Stream(const Rule& rule, const Piece& piece, const Task& task, double* out)
        : e(rule, piece), piece(piece), i(task.begin), left(of_block(task.begin, task.end)), end(task.end), out(out) {}

    int64_t of_block(int64_t begin, int64_t end) const { return end - begin < piece.inner ? end - begin : piece.inner; }

    ALWAYS bool advance(int64_t stride) {
        if (i == end) return false;
        const int64_t before = i;
        First::template chunk<MOST>(e, i, i + left, totals);
        left -= i - before;
        if (left == 0) {
            for (int k = 0; k < First::R; ++k) out[k * stride] = totals[k].sum() * First::factor(e, piece, k), totals[k] = {};
            left = of_block(i, end), ++out;
        }
        return true;
    }

    // A processor fetches memory for a single stream more slowly than it could, so tasks far apart take turns.
    static void sums(const Rule& rule, const Piece* const* pieces, const Task* const* tasks, double* const* out,
                     int64_t stride) {
        Stream all[STREAMS] = {{rule, *pieces[0], *tasks[0], out[0]}, {rule, *pieces[1], *tasks[1], out[1]},
                               {rule, *pieces[2], *tasks[2], out[2]}, {rule, *pieces[3], *tasks[3], out[3]}};
        for (bool more = true; more;) {
            more = false;
            for (Stream& one : all) more |= one.advance(stride);
        }
    }
};

template <class T, bool ADAM, Sums SUMS> struct Pass2 {  // GRADIENT: no correction; PAPER: w = z^-½; WEIGHTED: w = ζ z^-½
    typedef Entry<T, ADAM> E;
    typedef typename E::A A;
    typedef Vec<A> V;
    static constexpr int W = E::W;

    // θ ← θ + κ m/z + w c, with all numbers of the step multiplied into κ and c.
    template <bool PART, bool FETCH = !PART> INLINE void update(E& e, int64_t i, int n, V c, V kappa) {
        e.template read_gradient<PART, FETCH>(i, n, true);
        e.template read_moments<PART, FETCH>(i, n);
        PART ? store(e.second + i, e.r, n) : store(e.second + i, e.r);
        if (ADAM) PART ? store(e.first + i, e.m, n) : store(e.first + i, e.m);
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

    // What the numbers of blocks are multiplied by: −η, what debiasing leaves, and the inverse of the 2 of `roots`.
    INLINE double of_c(const E& e, const Piece& piece) { return -piece.rate * __builtin_sqrt(e.spread) / 2; }
    INLINE double of_kappa(const E& e, const Piece& piece) {
        return -piece.rate * piece.gain / e.spread / (SUMS == GRADIENT ? 1 : 4);
    }

    INLINE V gather(const double* values, int n, double other, double factor) {
        V x;
        for (int l = 0; l < W; ++l) x[l] = A((values && l < n ? values[l] : other) * factor);
        return x;
    }

    static void apply(const Rule& rule, const Piece& piece, const Task& task, const double* c, const double* kappa) {
        E e(rule, piece);
        const int64_t row = piece.blocks * piece.inner;
        const double for_c = of_c(e, piece), for_kappa = of_kappa(e, piece);
        if (SUMS == GRADIENT) {  // blocks play no part
            for (int64_t o = 0; o < piece.outer; ++o) {
                int64_t i = o * row + task.begin, end = o * row + task.end;
                walk(e, i, end, V{}, E::all(for_kappa));
            }
            return;
        }
        for (int64_t o = 0; o < piece.outer; ++o) {
            if (piece.inner == 1) {
                for (int64_t j = task.begin; j < task.end; j += W) {
                    const int n = task.end - j >= W ? W : int(task.end - j);
                    V own = gather(c + j, n, 0, for_c), factor = gather(kappa ? kappa + j : nullptr, n, 1, for_kappa);
                    n == W ? update<false>(e, o * row + j, n, own, factor) : update<true>(e, o * row + j, n, own, factor);
                }
                continue;
            }
            int64_t block = task.begin / piece.inner;
            for (int64_t j = task.begin; j < task.end; j += piece.inner, ++block) {
                V own = E::all(c[block] * for_c), factor = E::all((kappa ? kappa[block] : 1.0) * for_kappa);
                int64_t i = o * row + j, end = o * row + (j + piece.inner < task.end ? j + piece.inner : task.end);
                walk(e, i, end, own, factor);
            }
        }
    }
};

// Both passes and the solve between them, block by block: everything about a block happens while it is in the cache.
template <class T, bool ADAM> struct Local {
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

    static bool run(const Rule& rule, const Piece& piece, const Task& task, double* sums, int64_t stride,
                    const double* factor, const double* kappa) {
        alignas(64) A kept[2 * (LOCAL_BYTES / sizeof(A) + W)];
        E e(rule, piece);
        e.kept = kept;
        const double for_c = Second::of_c(e, piece), for_kappa = Second::of_kappa(e, piece);
        bool good = true;
        int64_t block = task.begin / piece.inner;
        for (int64_t i = task.begin; i < task.end; i += piece.inner, ++block) {
            const int64_t end = i + piece.inner;
            double own[First::R];
            e.origin = i;
            First::run(e, i, end, own);
            for (int k = First::FIRST; k < First::R; ++k)
                sums[block + k * stride] = own[k] *= First::factor(e, piece, k);
            if (!__builtin_isfinite(own[2]) || !__builtin_isfinite(own[3])) {
                good = false;
                continue;
            }
            V c = E::all(correction(own[3], own[2], factor[block]) * for_c);
            V k = E::all((kappa && own[2] > 0 ? kappa[block] : 1.0) * for_kappa);
            int64_t j = i;
            for (; end - j >= W; j += W) update<false>(e, j, W, c, k);
            if (j < end) update<true>(e, j, int(end - j), c, k);
        }
        return good;
    }
};

// ------------------------------------------------------------------ the choice at run time

template <class T, bool ADAM> void sums_of(const Rule& r, const Piece& p, const Task& t, double* out, int64_t stride) {
    if constexpr (!ADAM) {  // Adam has weighted forms only
        if (r.sums == PAPER) return Pass1<T, ADAM, PAPER>::sums(r, p, t, out, stride);
        if (r.sums == CONSISTENT) return Pass1<T, ADAM, CONSISTENT>::sums(r, p, t, out, stride);
    }
    if (r.sums == GRADIENT) return Pass1<T, ADAM, GRADIENT>::sums(r, p, t, out, stride);
    if (r.sums == SQUARES) return Pass1<T, ADAM, SQUARES>::sums(r, p, t, out, stride);
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

template <class T, bool ADAM>
void sums_in_turn(const Rule& r, const Piece* const* p, const Task* const* t, double* const* out, int64_t stride) {
    if constexpr (!ADAM) {
        if (r.sums == PAPER) return Stream<T, ADAM, PAPER>::sums(r, p, t, out, stride);
        if (r.sums == CONSISTENT) return Stream<T, ADAM, CONSISTENT>::sums(r, p, t, out, stride);
    }
    return Stream<T, ADAM, SQUARES>::sums(r, p, t, out, stride);
}

void streams(const Rule& r, const Piece* const* p, const Task* const* t, double* const* out, int64_t stride) {
    switch (p[0]->dtype) {
        case FLOAT64: return (r.adam ? sums_in_turn<double, true> : sums_in_turn<double, false>)(r, p, t, out, stride);
        case BFLOAT16: return (r.adam ? sums_in_turn<bfloat16, true> : sums_in_turn<bfloat16, false>)(r, p, t, out, stride);
        case FLOAT16: return (r.adam ? sums_in_turn<float16, true> : sums_in_turn<float16, false>)(r, p, t, out, stride);
        default: return (r.adam ? sums_in_turn<float, true> : sums_in_turn<float, false>)(r, p, t, out, stride);
    }
}

bool local(const Rule& r, const Piece& p, const Task& t, double* out, int64_t stride, const double* factor,
           const double* kappa) {
    switch (p.dtype) {
        case FLOAT64: return (r.adam ? Local<double, true>::run : Local<double, false>::run)(r, p, t, out, stride, factor, kappa);
        case BFLOAT16: return (r.adam ? Local<bfloat16, true>::run : Local<bfloat16, false>::run)(r, p, t, out, stride, factor, kappa);
        case FLOAT16: return (r.adam ? Local<float16, true>::run : Local<float16, false>::run)(r, p, t, out, stride, factor, kappa);
        default: return (r.adam ? Local<float, true>::run : Local<float, false>::run)(r, p, t, out, stride, factor, kappa);
    }
}

}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

extern const Kernels blockmean::JOIN(kernels_, VARIANT) = {TEXT(VARIANT), sums, streams, apply, local};
