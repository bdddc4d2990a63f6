"""Anova's steady step on a GPU: the code of the device. `triton_anova` has its tables, and launches it.

A launch serves all matrices of a step. Equations: the head of anova.py; names: decomposition.py.

    project        parts of GV = G V, UG = Uᵀ G, K = UG V, ‖G_i‖² and ‖G‖²; G is read once for 32 means
    add            ‖G‖² and K, from their parts
    update_sides   MV, X and UM, Y; parts of the squares of R = GV − U K, and of L Lᵀ, L = UG − K Vᵀ
    add            the squares of R, and L Lᵀ
    update_grand   K_m, v_K, v_R, v_L; D_K K_m, D_R, D_L and c
    precondition   v_E and D_E; left and right of c δ = diag(c D_E) M + left · right
    update         M and θ

A program finds in a map which part of which matrix it has, and the matrix in a table. Sums over a matrix are stored in
parts, which are added in a fixed order: two steps from equal bits give equal bits. Tails are masked and read as zero,
and zero rows and columns change no sum. Offsets have 64 bits where a tile begins, and 32 inside it.

Global memory is not ordered between the warps of a program. What is stored in place is therefore loaded by nobody but
the thread that stores it; `update_grand` has a single warp, and `precondition` finds the old v_E in scratch.
"""

import triton
import triton.language as tl

from blockmean import _linalg
from blockmean.optim import decomposition

NOISE, LEAST = tl.constexpr(_linalg.NOISE), tl.constexpr(decomposition.LEAST)
LOWEST = tl.constexpr(decomposition.FACTORS[0])
FOLLOW = tl.constexpr(1 - decomposition.FORGET)
ROOT_TINY = tl.constexpr(2.0**-63)

MEANS = tl.constexpr(32)  # columns of U and of V in a program of `project`
TERMS = tl.constexpr(16)  # of a product that are added at a time: registers suffice for so many

# Columns of the table, int64: addresses, sizes, and offsets into scratch of what `Layout` describes.
PARAM, GRAD, EXP_AVG, UNIT_MEANS, INPUT_MEANS, GRAND_MEANS = map(tl.constexpr, range(6))
UNITS, INPUTS, K_COLUMNS, Q_COLUMNS = map(tl.constexpr, range(6, 10))
TOTAL, GV_PARTS, ROW_PARTS, UG_PARTS, K_PARTS, R_PARTS, L_PARTS = map(tl.constexpr, range(10, 17))
SUMS, SCALES, ROWS, LEFT, RIGHT, COLUMNS = map(tl.constexpr, range(17, 23))


@triton.jit
def part_of(table, programs):
    """The row of the table for this program's matrix, and which part of the matrix it has."""
    program = programs + 3 * tl.program_id(0)
    return table + COLUMNS * tl.load(program), tl.load(program + 1), tl.load(program + 2)


@triton.jit
def sizes_of(matrix, ALIGNED: tl.constexpr = False):
    """O, I, k, q. I is a multiple of 8 where rows are aligned, and the compiler gets to know."""
    O, I = tl.load(matrix + UNITS).to(tl.int32), tl.load(matrix + INPUTS).to(tl.int32)
    k, q = tl.load(matrix + K_COLUMNS).to(tl.int32), tl.load(matrix + Q_COLUMNS).to(tl.int32)
    return O, I // 8 * 8 if ALIGNED else I, k, q


@triton.jit
def tensor(matrix, column: tl.constexpr, DTYPE: tl.constexpr = tl.float32, ALIGNED: tl.constexpr = False):
    """A tensor, by its address."""
    pointer = tl.load(matrix + column).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def lerp(start, end, weight):
    """torch.lerp: exact at both ends."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


@triton.jit
def load1(pointer, i, length):
    return tl.load(pointer + i, mask=i < length, other=0.0)


@triton.jit
def store1(pointer, i, length, value):
    tl.store(pointer + i, value, mask=i < length)


@triton.jit
def load2(pointer, i, j, stride_i, stride_j, rows, columns):
    """Entries (i, j) of a (rows, columns) matrix; zero beyond."""
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(pointer + (i[:, None] * stride_i + j[None, :] * stride_j), mask=mask, other=0.0)


@triton.jit
def store2(pointer, i, j, stride_i, stride_j, rows, columns, value):
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(pointer + (i[:, None] * stride_i + j[None, :] * stride_j), value, mask=mask)


@triton.jit
def product(a, i, a_i, a_c, rows, b, j, b_c, b_j, columns, length, value, PRECISION: tl.constexpr = "ieee"):
    """value + A B, (i, c) times (c, j), by strides."""
    for start in range(0, length, TERMS):
        c = start + tl.arange(0, TERMS)
        A, B = load2(a, i, c, a_i, a_c, rows, length), load2(b, c, j, b_c, b_j, length, columns)
        value = tl.dot(A, B, value, input_precision=PRECISION)
    return value


# -------------------------------------------------------------------- pass 1


@triton.jit
def project(
    table, programs, scratch, sign,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr, PIECE: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A strip of columns, TILE rows of it, STEP rows at a time: UG stays in registers, GV goes out at once."""
    matrix, tile, strip = part_of(table, programs)
    O, I, k, q = sizes_of(matrix, ALIGNED)
    first = tl.program_id(1) * MEANS
    if first >= tl.maximum(k, q):
        return
    at, width, V = tile * TILE, 2 * k + q + 1, tensor(matrix, INPUT_MEANS)
    rows = tl.minimum(O - at, TILE).to(tl.int32)
    G, U = tensor(matrix, GRAD, DTYPE, ALIGNED) + at * I, tensor(matrix, UNIT_MEANS) + at * width
    GV_part = scratch + tl.load(matrix + GV_PARTS) + (strip * O + at) * q
    row_part = scratch + tl.load(matrix + ROW_PARTS) + strip * O + at
    c, j = first + tl.arange(0, MEANS), (strip * STRIP).to(tl.int32) + tl.arange(0, STRIP)
    # A batch of PIECE columns for every warp: short sums need few registers, which the three parts of tf32x3 fill.
    PIECES: tl.constexpr = STRIP // PIECE
    V_c = tl.reshape(load2(V, j, c, 1, I, I, q), (PIECES, PIECE, MEANS))
    UG, total = tl.zeros((PIECES, MEANS, PIECE), tl.float32), tl.zeros((STEP,), tl.float32)
    for start in range(0, rows, STEP):
        r = start + tl.arange(0, STEP)
        g = sign * load2(G, r, j, I, 1, rows, I).to(tl.float32)
        squares = tl.sum(g * g, 1)
        total += squares
        tl.store(row_part + r, squares, mask=(r < rows) & (first == 0))
        g = tl.permute(tl.reshape(g, (STEP, PIECES, PIECE)), (1, 0, 2))
        GV = tl.sum(tl.dot(g, V_c, input_precision=PRECISION), 0)
        store2(GV_part, r, c, q, 1, rows, q, GV)
        U_c = tl.trans(load2(U, r, c, width, 1, rows, k))
        UG = tl.dot(tl.broadcast_to(U_c[None, :, :], (PIECES, MEANS, STEP)), g, UG, input_precision=PRECISION)
    UG_part = scratch + tl.load(matrix + UG_PARTS) + tile * k * I
    store2(UG_part, c, j, I, 1, k, I, tl.reshape(tl.permute(UG, (1, 0, 2)), (MEANS, STRIP)))
    K_part = scratch + tl.load(matrix + K_PARTS) + (tile * tl.cdiv(I, STRIP) + strip) * (1 + k * q)
    tl.store(K_part, tl.sum(total, 0), mask=first == 0)
    for start in range(0, q, MEANS):
        c_V = start + tl.arange(0, MEANS)
        V_c = tl.reshape(load2(V, j, c_V, 1, I, I, q), (PIECES, PIECE, MEANS))
        store2(K_part + 1, c, c_V, q, 1, k, q, tl.sum(tl.dot(UG, V_c, input_precision=PRECISION), 0))


@triton.jit
def add(sums, scratch, WIDTH: tl.constexpr):
    """The sums of WIDTH columns of a matrix, whose rows are parts; as many rows at a time."""
    row = sums + 6 * tl.program_id(0)
    source, stride, parts = scratch + tl.load(row), tl.load(row + 1), tl.load(row + 2)
    columns, target = tl.load(row + 3), scratch + tl.load(row + 4)
    i, j = tl.arange(0, WIDTH), tl.load(row + 5) + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in range(0, parts, WIDTH):
        total += load2(source, start + i, j, stride, 1, parts, columns)
    store1(target, j, columns, tl.sum(total, 0))


# -------------------------------------------------------------------- between the passes


@triton.jit
def added(parts, count, stride, r, c, r_stride, c_stride, rows, columns):
    """Entries (r, c) of GV, or of UGᵀ, from its parts."""
    total = load2(parts, r, c, r_stride, c_stride, rows, columns)
    for part in range(1, count):
        total += load2(parts + part * stride, r, c, r_stride, c_stride, rows, columns)
    return total


@triton.jit
def update_side(
    W, S, A, r_W, c_W, parts, count, stride, r_T, c_T, K, m_K, n_K, rows, m, n, news,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of a side: A ← average of T, S ← average of T Kᵀ. Returns T and T − W K.

    W (·×m), S, A and T (·×n) are U, X, MV and GV; or V, Y, UMᵀ and UGᵀ, and then K is Kᵀ. Strides say which.
    """
    r, c = tl.arange(0, BLOCK), tl.arange(0, PAD)
    T, TK = added(parts, count, stride, r, c, r_T, c_T, rows, n), tl.zeros((BLOCK, PAD), tl.float32)
    for start in range(0, n, TERMS):
        t = start + tl.arange(0, TERMS)
        T_t = added(parts, count, stride, r, t, r_T, c_T, rows, n)
        TK = tl.dot(T_t, load2(K, t, c, n_K, m_K, n, m), TK, input_precision="ieee")
    store2(S, r, c, r_W, c_W, rows, m, lerp(load2(S, r, c, r_W, c_W, rows, m), TK, FOLLOW))
    store2(A, r, c, r_W, c_W, rows, n, lerp(load2(A, r, c, r_W, c_W, rows, n), T, news))
    return T, T - product(W, r, r_W, c_W, rows, K, c, m_K, n_K, n, m, tl.zeros_like(T))


@triton.jit
def update_sides(
    ok, table, programs, scratch, news,
    PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of X and MV, or columns of Y and UM; squares of R, or L Lᵀ; ‖G_i‖² and ‖F_i‖²."""
    if tl.load(ok) == 0:
        return
    matrix, block, is_input = part_of(table, programs)
    O, I, k, q = sizes_of(matrix)
    at, r, c, K = block * BLOCK, tl.arange(0, BLOCK), tl.arange(0, PAD), scratch + tl.load(matrix + SUMS)
    if is_input:
        V, UG_parts, row = tensor(matrix, INPUT_MEANS) + at, scratch + tl.load(matrix + UG_PARTS) + at, I.to(tl.int64)
        _, L = update_side(
            V, V + q * row, V + 2 * q * row, 1, I, UG_parts, tl.cdiv(O, TILE), k * row, 1, I,
            K, 1, q, (I - at).to(tl.int32), q, k, news, PAD, BLOCK,
        )  # fmt: skip
        LL = tl.dot(tl.trans(L), L, input_precision="ieee")
        store2(scratch + tl.load(matrix + L_PARTS) + block * k * k, c, c, k, 1, k, k, LL)
    else:
        rows, width, strips = (O - at).to(tl.int32), 2 * k + q + 1, tl.cdiv(I, STRIP)
        U, GV_parts = tensor(matrix, UNIT_MEANS) + at * width, scratch + tl.load(matrix + GV_PARTS) + at * q
        GV, R = update_side(
            U, U + k, U + 2 * k, width, 1, GV_parts, strips, O.to(tl.int64) * q, q, 1,
            K, q, 1, rows, k, q, news, PAD, BLOCK,
        )  # fmt: skip
        store1(scratch + tl.load(matrix + R_PARTS) + block * q, c, q, tl.sum(R * R, 0))
        of_rows, row_parts = scratch + tl.load(matrix + ROWS) + at, scratch + tl.load(matrix + ROW_PARTS) + at
        squares = tl.zeros((BLOCK,), tl.float32)
        for strip in range(strips):
            squares += load1(row_parts + O.to(tl.int64) * strip, r, rows)
        store1(of_rows, r, rows, squares)
        store1(of_rows + O, r, rows, squares - tl.sum(GV * GV, 1))
        v_E = tl.load(U + (r * width + width - 1), mask=r < rows, other=0.0)
        store1(of_rows + 2 * O.to(tl.int64), r, rows, v_E)


@triton.jit
def root(v, weight, floor):
    """√v̂ + ε and a floor; never 0, so that 0 / 0 is 0."""
    return tl.maximum(tl.sqrt_rn(v / weight) + floor, ROOT_TINY)


@triton.jit
def update_grand(ok, rates, table, scratch, news, mean_news, rest_news, eps, PAD: tl.constexpr):
    """One matrix: its grand means, and all numbers that its rows or columns share."""
    if tl.load(ok) == 0:
        return
    matrix = table + COLUMNS * tl.program_id(0).to(tl.int64)
    O, I, k, q = sizes_of(matrix)
    O, I, c, total = O.to(tl.float32), I.to(tl.float32), tl.arange(0, PAD), tl.load(scratch + tl.load(matrix + TOTAL))
    K_m, K, D = tensor(matrix, GRAND_MEANS), scratch + tl.load(matrix + SUMS), scratch + tl.load(matrix + SCALES)
    v_K, v_R, v_L, scalars = K_m + k * q, K_m + 2 * k * q, K_m + 2 * k * q + q, K_m + 2 * k * q + q + k
    old_R, old_L, factor = load1(v_R, c, q), load1(v_L, c, k), tl.load(scalars + 2)
    variance, rest_variance = tl.load(scalars), tl.load(scalars + 1)
    w, w_means, w_rest = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    w, w_means, w_rest = lerp(w, 1.0, news), lerp(w_means, 1.0, mean_news), lerp(w_rest, 1.0, rest_news)
    factor = tl.maximum(tl.minimum(factor, tl.load(rates + 1)), LOWEST)
    variance = lerp(variance, total / (O * I), rest_news)
    lifted = 1 / (factor * root(variance, w_rest, eps))

    STEP: tl.constexpr = 512 // PAD
    known = tl.zeros((STEP, PAD), tl.float32)
    for start in range(0, k, STEP):
        known += load2(v_K, start + tl.arange(0, STEP), c, q, 1, k, q)
    known_sum = tl.sum(tl.sum(known, 1), 0) + O * tl.sum(old_R, 0) + I * tl.sum(old_L, 0)
    noise = tl.sqrt_rn(total + known_sum) * NOISE  # rounding errors are those of what M remembers, too
    squares = tl.zeros((STEP, PAD), tl.float32)
    for start in range(0, k, STEP):
        i = start + tl.arange(0, STEP)
        K_i = load2(K, i, c, q, 1, k, q)
        squares += K_i * K_i
        mean = lerp(load2(K_m, i, c, q, 1, k, q), K_i, news)
        v = lerp(load2(v_K, i, c, q, 1, k, q), K_i * K_i, mean_news)
        store2(K_m, i, c, q, 1, k, q, mean)
        store2(v_K, i, c, q, 1, k, q, v)
        root_K = root(v, w_means, eps + noise)
        rho = mean / root_K / w  # a mean that agrees over steps moves as with one σ for all entries
        store2(D, i, c, q, 1, k, q, mean * tl.maximum(1 / root_K, tl.minimum(rho * rho, 1.0) * lifted))
    of_R, of_L = load1(K + k * q, c, q), load1(K + k * q + q, c * (k + 1), k * k)  # L Lᵀ's diagonal
    new_R, new_L = lerp(old_R, of_R / O, mean_news), lerp(old_L, of_L / I, mean_news)
    store1(v_R, c, q, new_R)
    store1(v_L, c, k, new_L)
    store1(D + k * q, c, q, 1 / root(new_R, w_means, eps + noise / tl.sqrt_rn(O)))
    store1(D + k * q + q, c, k, 1 / root(new_L, w_means, eps + noise / tl.sqrt_rn(I)))

    without_V = total - tl.sum(tl.sum(squares, 1), 0) - tl.sum(of_R, 0)
    rest = tl.maximum(without_V - tl.sum(of_L, 0), 0.0)
    share = rest / without_V
    tl.store(D + k * q + q + k, tl.where(share > 0, tl.minimum(share, 1.0), 0.0))  # 0 for NaN
    tl.store(D + k * q + q + k + 1, factor)
    tl.store(D + k * q + q + k + 2, noise)
    tl.store(scalars, variance)
    tl.store(scalars + 1, lerp(rest_variance, rest / (O * I), rest_news))
    tl.store(scalars + 3, w)
    tl.store(scalars + 4, w_means)
    tl.store(scalars + 5, w_rest)


@triton.jit
def precondition(ok, table, programs, scratch, rest_news, eps, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK rows of v_E, c D_E and left = c [U D_K K_m + R_m D_R − D_E MV | U D_L − D_E U]; or columns of L_m."""
    if tl.load(ok) == 0:
        return
    matrix, block, is_input = part_of(table, programs)
    O, I, k, q = sizes_of(matrix)
    at, r, c, zero = block * BLOCK, tl.arange(0, BLOCK), tl.arange(0, PAD), tl.zeros((BLOCK, PAD), tl.float32)
    K_m, D = tensor(matrix, GRAND_MEANS), scratch + tl.load(matrix + SCALES)
    if is_input:
        V, columns = tensor(matrix, INPUT_MEANS) + at, (I - at).to(tl.int32)
        UM = load2(V + 2 * q * I.to(tl.int64), r, c, 1, I, columns, k)
        L_m = UM - product(V, r, 1, I, columns, K_m, c, 1, q, k, q, zero)
        store2(scratch + tl.load(matrix + RIGHT) + at, r, c, 1, I, columns, k, L_m)
    else:
        rows, width, of_rows = (O - at).to(tl.int32), 2 * k + q + 1, scratch + tl.load(matrix + ROWS) + at
        left, U_rows = scratch + tl.load(matrix + LEFT) + at * (q + k), tensor(matrix, UNIT_MEANS) + at * width
        U, MV = load2(U_rows, r, c, width, 1, rows, k), load2(U_rows + 2 * k, r, c, width, 1, rows, q)
        squares, f, stride = load1(of_rows, r, rows), load1(of_rows + O, r, rows), O.to(tl.int64)
        share, factor = tl.load(D + k * q + q + k), tl.load(D + k * q + q + k + 1)
        LL = scratch + tl.load(matrix + SUMS) + k * q + q
        UL = tl.sum(product(U_rows, r, width, 1, rows, LL, c, k, 1, k, k, zero) * U, 1)  # ‖U_i L‖²
        e = tl.maximum(tl.abs(f - UL), tl.maximum(share * f, squares * LEAST))
        v = lerp(load1(of_rows + 2 * stride, r, rows), e / I, rest_news)
        tl.store(U_rows + (r * width + width - 1), v, mask=r < rows)
        floor = eps + tl.load(D + k * q + q + k + 2) / tl.sqrt_rn(O.to(tl.float32) * I)
        d = 1 / root(v, tl.load(K_m + 2 * k * q + q + k + 5), floor)
        store1(of_rows + 3 * stride, r, rows, factor * d)

        R_m = MV - product(U_rows, r, width, 1, rows, K_m, c, q, 1, q, k, zero)
        of_inputs = R_m * load1(D + k * q, c, q)[None, :] - d[:, None] * MV
        of_inputs = product(U_rows, r, width, 1, rows, D, c, q, 1, q, k, of_inputs)
        of_units = U * (load1(D + k * q + q, c, k)[None, :] - d[:, None])
        store2(left, r, c, q + k, 1, rows, q, factor * of_inputs)
        store2(left + q, r, c, q + k, 1, rows, k, factor * of_units)


# -------------------------------------------------------------------- pass 2


@triton.jit
def update(
    ok, rates, table, programs, scratch, sign, news, weight_decay,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile: M ← average of G, θ ← (1 − η w) θ − η c δ."""
    if tl.load(ok) == 0:
        return
    matrix, tile, strip = part_of(table, programs)
    O, I, k, q = sizes_of(matrix, ALIGNED)
    at, r, j = tile * TILE, tl.arange(0, TILE), (strip * STRIP).to(tl.int32) + tl.arange(0, STRIP)
    rows, M = (O - at).to(tl.int32), tensor(matrix, EXP_AVG, tl.float32, ALIGNED) + at * I
    G, P = tensor(matrix, GRAD, DTYPE, ALIGNED) + at * I, tensor(matrix, PARAM, DTYPE, ALIGNED) + at * I
    g = sign * load2(G, r, j, I, 1, rows, I).to(tl.float32)
    m = lerp(load2(M, r, j, I, 1, rows, I), g, news)
    p = load2(P, r, j, I, 1, rows, I).to(tl.float32)
    store2(M, r, j, I, 1, rows, I, m)
    left, right = scratch + tl.load(matrix + LEFT) + at * (q + k), scratch + tl.load(matrix + RIGHT)
    d = load1(scratch + tl.load(matrix + ROWS) + 3 * O.to(tl.int64) + at, r, rows)
    delta = product(left, r, q + k, 1, rows, tensor(matrix, INPUT_MEANS), j, I, 1, I, q, d[:, None] * m, PRECISION)
    delta = product(left + q, r, q + k, 1, rows, right, j, I, 1, I, k, delta, PRECISION)
    lr, w = tl.load(rates), tl.load(tensor(matrix, GRAND_MEANS) + 2 * k * q + q + k + 3)
    p = (1 - lr * weight_decay) * p - lr / w * delta
    store2(P, r, j, I, 1, rows, I, p.to(DTYPE))
