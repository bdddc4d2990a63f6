"""Anova's steady step on a GPU: the code of the device. `triton_anova` has the tables, and launches it.

A launch serves all matrices of a step. A program finds its matrix and tile in a map, and the matrix in a table of
addresses. Sums over a matrix are partial sums in scratch, which another launch adds in a fixed order: two steps from
equal bits give equal bits. Tails are masked and read as zero, and zero rows and columns change no sum.

    project      parts of GV, UG, ‖G_i‖² and ‖G‖²; G is read once
    collect      UG and, in parts, K = UG V
    gather       adds parts of K and ‖G‖²
    unit_side    X, MV and, in parts, the squares of R = GV − U K
    input_side   Y, UM, right and, in parts, L Lᵀ, L = UG − K Vᵀ
    gather       adds parts of R's squares and of L Lᵀ
    grand        all that has one value for a matrix or for a mean
    direct       v_E, d and left
    update       M and θ

Global memory is not ordered between the warps of a program. What is stored in place is either used by nobody but the
thread that stores it, or stored behind a barrier that comes after all loads of it.
"""

import triton
import triton.language as tl

# Columns of the table, int64: addresses, sizes, offsets into scratch, pairs of float32 numbers.
PARAM, GRAD, EXP_AVG, UNIT_MEANS, INPUT_MEANS, GRAND_MEANS, LR = map(tl.constexpr, range(7))
UNITS, INPUTS, K_COLUMNS, Q_COLUMNS = map(tl.constexpr, range(7, 11))
THIN = tl.constexpr(11)  # parts of GV, (strips, O, q); later left, (O, q+k)
LENGTHS = tl.constexpr(12)  # parts of ‖G_i‖², (strips, O)
WIDE = tl.constexpr(13)  # parts of UG, (tiles, k, I); later UG
RIGHT = tl.constexpr(14)  # UM − K_m Vᵀ, (k, I)
ROWS = tl.constexpr(15)  # f, ‖G_i‖² and c d, (3, O)
TOTALS = tl.constexpr(16)  # parts of ‖G‖², (tiles · strips)
K_PARTS = tl.constexpr(17)  # (·, k, q)
R_PARTS = tl.constexpr(18)  # of squares of R, (·, q)
L_PARTS = tl.constexpr(19)  # of L Lᵀ, (·, k, k)
SMALL = tl.constexpr(20)  # K (k, q), K_m/rK (k, q), squares of R (q), 1/rR (q), 1/rL (k), share, c, L Lᵀ (k, k)
NUMBERS = tl.constexpr(21)  # 1−β₁, 1−mean_beta, 1−β₂, weight decay, ε, sign
FIELDS = tl.constexpr(24)

FOLLOW = tl.constexpr(1 - 0.95)  # 1 − ρ
LEAST = tl.constexpr(2.0**-18)
NOISE = tl.constexpr(2.0**-19)
LOWEST_FACTOR, HIGHEST_FACTOR = tl.constexpr(0.7), tl.constexpr(20.0)
LIFT, GENTLE = tl.constexpr(7e-3), tl.constexpr(3e-2)
ROOT_TINY = tl.constexpr(2.0**-63)


@triton.jit
def size(matrix, field: tl.constexpr):
    return tl.load(matrix + field).to(tl.int32)


@triton.jit
def floats(matrix, field: tl.constexpr):
    """A float32 tensor of the state, by its address."""
    return tl.load(matrix + field).to(tl.pointer_type(tl.float32))


@triton.jit
def number(matrix, i: tl.constexpr):
    return tl.load((matrix + NUMBERS).to(tl.pointer_type(tl.float32)) + i)


@triton.jit
def lerp(start, end, weight):
    """torch.lerp: exact at both ends."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


@triton.jit
def load2(pointer, i, j, stride, rows, columns, stride_j=1):
    """Entries (i, j) of a (rows, columns) matrix; zero beyond."""
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(pointer + (i[:, None] * stride + j[None, :] * stride_j), mask=mask, other=0.0)


@triton.jit
def store2(pointer, i, j, stride, rows, columns, value):
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(pointer + (i[:, None] * stride + j[None, :]), value, mask=mask)


@triton.jit
def product(a, i, a_i, a_c, rows, b, j, b_c, b_j, columns, length, value, PRECISION: tl.constexpr):
    """value + A B, (i, c) times (c, j), by strides; 32 of the sum at a time, for which registers suffice."""
    for start in range(0, length, 32):
        c = start + tl.arange(0, 32)
        A, B = load2(a, i, c, a_i, rows, length, a_c), load2(b, c, j, b_c, length, columns, b_j)
        value = tl.dot(A, B, value, input_precision=PRECISION)
    return value


@triton.jit
def batched(a, b, value, PRECISION: tl.constexpr):
    """value + a b, batch by batch: a batch is a warp's, but a single one is everybody's."""
    if a.shape[0] > 1:
        value = tl.dot(a, b, value, input_precision=PRECISION)
    else:
        one, other = tl.reshape(a, (a.shape[1], a.shape[2])), tl.reshape(b, (b.shape[1], b.shape[2]))
        flat = tl.reshape(value, (a.shape[1], b.shape[2]))
        value = tl.reshape(tl.dot(one, other, flat, input_precision=PRECISION), (1, a.shape[1], b.shape[2]))
    return value


# -------------------------------------------------------------------- pass 1


@triton.jit(do_not_specialize=["first"])
def project(
    matrices, tiles, scratch, first,
    GRAD_TYPE: tl.constexpr, ALIGNED: tl.constexpr, K_PAD: tl.constexpr, Q_PAD: tl.constexpr,
    TILE: tl.constexpr, STRIP: tl.constexpr, STEP: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A strip of columns, TILE rows of it, STEP rows at a time: UG stays in registers, GV goes out at once."""
    tile = tiles + 3 * (first + tl.program_id(0))
    matrix = matrices + FIELDS * tl.load(tile)
    block, strip = tl.load(tile + 1), tl.load(tile + 2)
    O, I, k, q = size(matrix, UNITS), size(matrix, INPUTS), size(matrix, K_COLUMNS), size(matrix, Q_COLUMNS)
    G, unit_means = tl.load(matrix + GRAD).to(tl.pointer_type(GRAD_TYPE)), floats(matrix, UNIT_MEANS)
    if ALIGNED:
        I, G = I // 8 * 8, tl.multiple_of(G, 16)
    sign, width = number(matrix, 5), 2 * k + q + 1
    # A batch of PIECE columns for every warp: short sums need few registers, which the three parts of tf32x3 fill.
    columns = tl.arange(0, STRIP // PIECE)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    columns += (strip * STRIP).to(tl.int32)
    within = columns < I
    ks, qs, r = tl.arange(0, K_PAD), tl.arange(0, Q_PAD), tl.arange(0, STEP)
    V = tl.load(
        floats(matrix, INPUT_MEANS) + (qs[None, None, :] * I + columns[:, :, None]),
        mask=(qs < q)[None, None, :] & within[:, :, None], other=0.0,
    )  # fmt: skip
    GV_part = scratch + tl.load(matrix + THIN) + strip * O * q
    lengths = scratch + tl.load(matrix + LENGTHS) + strip * O
    UG, total = tl.zeros((STRIP // PIECE, K_PAD, PIECE), tl.float32), tl.zeros((STEP,), tl.float32)
    begin = (block * TILE).to(tl.int32)
    end = tl.minimum(begin + TILE, O)
    entries = r[None, :, None] * I + columns[:, None, :]
    coming = tl.load(
        G + block * TILE * I + entries, mask=(begin + r < end)[None, :, None] & within[:, None, :], other=0.0
    )
    for start in range(begin, end, STEP):
        at, left = block * TILE + (start - begin), end - start
        g = coming.to(tl.float32)
        coming = tl.load(  # one step ahead of what is computed
            G + (at + STEP) * I + entries, mask=(STEP + r < left)[None, :, None] & within[:, None, :], other=0.0
        )
        length = tl.sum(tl.sum(g * g, 2), 0)
        total += length
        tl.store(lengths + at + r, length, mask=r < left)
        GV = tl.sum(batched(g, V, tl.zeros((STRIP // PIECE, STEP, Q_PAD), tl.float32), PRECISION), 0)
        store2(GV_part + at * q, r, qs, q, left, q, sign * GV)
        U = tl.trans(load2(unit_means + at * width, r, ks, width, left, k))
        U = tl.broadcast_to(U[None, :, :], (STRIP // PIECE, K_PAD, STEP))
        UG = batched(U, g, UG, PRECISION)
    tl.store(
        scratch + tl.load(matrix + WIDE) + block * k * I + (ks[None, :, None] * I + columns[:, None, :]), sign * UG,
        mask=(ks < k)[None, :, None] & within[:, None, :],
    )  # fmt: skip
    tl.store(scratch + tl.load(matrix + TOTALS) + block * tl.cdiv(I, STRIP) + strip, tl.sum(total, 0))


@triton.jit
def collect(
    matrices, blocks, scratch,
    K_PAD: tl.constexpr, Q_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK columns: UG is added up and takes the place of its first part; K in parts."""
    matrix = matrices + FIELDS * tl.load(blocks + 2 * tl.program_id(0))
    block = tl.load(blocks + 2 * tl.program_id(0) + 1)
    I, k, q = size(matrix, INPUTS), size(matrix, K_COLUMNS), size(matrix, Q_COLUMNS)
    j, ks, qs = (block * BLOCK).to(tl.int32) + tl.arange(0, BLOCK), tl.arange(0, K_PAD), tl.arange(0, Q_PAD)
    wide, UG = scratch + tl.load(matrix + WIDE), tl.zeros((K_PAD, BLOCK), tl.float32)
    for tile in range(tl.cdiv(size(matrix, UNITS), TILE)):
        UG += load2(wide + I.to(tl.int64) * tile * k, ks, j, I, k, I)
    V = tl.trans(load2(floats(matrix, INPUT_MEANS), qs, j, I, q, I))
    K_part = scratch + tl.load(matrix + K_PARTS) + block * k * q
    store2(K_part, ks, qs, q, k, q, tl.dot(UG, V, input_precision=PRECISION))
    tl.debug_barrier()  # every warp has loaded the first part
    store2(wide, ks, j, I, k, I, UG)


@triton.jit
def gather(sums, scratch, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of a matrix of parts, added; PARTS rows at a time."""
    row = sums + 6 * tl.program_id(0)
    source, stride, parts = scratch + tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32)
    columns, target = tl.load(row + 3).to(tl.int32), scratch + tl.load(row + 4)
    p, j = tl.arange(0, PARTS), tl.load(row + 5).to(tl.int32) + tl.arange(0, WIDTH)
    total = tl.zeros((PARTS, WIDTH), tl.float32)
    for start in range(0, parts, PARTS):
        mask = (start + p < parts)[:, None] & (j < columns)[None, :]
        total += tl.load(source + ((start + p)[:, None] * stride + j[None, :]), mask=mask, other=0.0)
    tl.store(target + j, tl.sum(total, 0), mask=j < columns)


# -------------------------------------------------------------------- between the passes


@triton.jit
def unit_side(
    ok, matrices, blocks, scratch,
    K_PAD: tl.constexpr, Q_PAD: tl.constexpr, BLOCK: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK rows: GV is added up, and X and MV follow it."""
    if tl.load(ok) == 0:
        return
    matrix = matrices + FIELDS * tl.load(blocks + 2 * tl.program_id(0))
    block = tl.load(blocks + 2 * tl.program_id(0) + 1)
    O, k, q = size(matrix, UNITS), size(matrix, K_COLUMNS), size(matrix, Q_COLUMNS)
    at, width = block * BLOCK, 2 * k + q + 1
    left = O - at.to(tl.int32)
    r, ks, qs = tl.arange(0, BLOCK), tl.arange(0, K_PAD), tl.arange(0, Q_PAD)
    GV_part, length_part = scratch + tl.load(matrix + THIN) + at * q, scratch + tl.load(matrix + LENGTHS) + at
    GV, lengths = tl.zeros((BLOCK, Q_PAD), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for strip in range(tl.cdiv(size(matrix, INPUTS), STRIP)):
        GV += load2(GV_part + O.to(tl.int64) * strip * q, r, qs, q, left, q)
        lengths += tl.load(length_part + O.to(tl.int64) * strip + r, mask=r < left, other=0.0)
    tl.debug_barrier()  # every warp has loaded the first part, whose place GV takes
    store2(GV_part, r, qs, q, left, q, GV)
    means, K = floats(matrix, UNIT_MEANS) + at * width, scratch + tl.load(matrix + SMALL)
    R = GV - product(means, r, width, 1, left, K, qs, q, 1, q, k, tl.zeros_like(GV), PRECISION)
    tl.store(scratch + tl.load(matrix + R_PARTS) + block * q + qs, tl.sum(R * R, 0), mask=qs < q)
    MV = load2(means + 2 * k, r, qs, width, left, q)
    store2(means + 2 * k, r, qs, width, left, q, lerp(MV, GV, number(matrix, 0)))
    tl.debug_barrier()  # GV can be loaded
    GVK = product(GV_part, r, q, 1, left, K, ks, 1, q, k, q, tl.zeros((BLOCK, K_PAD), tl.float32), PRECISION)
    store2(means + k, r, ks, width, left, k, lerp(load2(means + k, r, ks, width, left, k), GVK, FOLLOW))
    rows = scratch + tl.load(matrix + ROWS) + at
    tl.store(rows + r, lengths - tl.sum(GV * GV, 1), mask=r < left)
    tl.store(rows + O + r, lengths, mask=r < left)


@triton.jit
def input_side(
    ok, matrices, blocks, scratch,
    K_PAD: tl.constexpr, Q_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK columns: Y and UM follow UG; right for pass 2."""
    if tl.load(ok) == 0:
        return
    matrix = matrices + FIELDS * tl.load(blocks + 2 * tl.program_id(0))
    block = tl.load(blocks + 2 * tl.program_id(0) + 1)
    I, k, q = size(matrix, INPUTS), size(matrix, K_COLUMNS), size(matrix, Q_COLUMNS)
    j, ks, qs = (block * BLOCK).to(tl.int32) + tl.arange(0, BLOCK), tl.arange(0, K_PAD), tl.arange(0, Q_PAD)
    UG_place = scratch + tl.load(matrix + WIDE)
    UG = load2(UG_place, ks, j, I, k, I)
    means, K, K_m = floats(matrix, INPUT_MEANS), scratch + tl.load(matrix + SMALL), floats(matrix, GRAND_MEANS)
    KV = product(K, ks, q, 1, k, means, j, I, 1, I, q, tl.zeros_like(UG), PRECISION)
    L = UG - KV
    LL = tl.dot(L, tl.trans(L), input_precision=PRECISION)
    store2(scratch + tl.load(matrix + L_PARTS) + block * k * k, ks, ks, k, k, k, LL)
    follow, average = means + q * I.to(tl.int64), means + 2 * q * I.to(tl.int64)
    KUG = product(K, qs, 1, q, q, UG_place, j, I, 1, I, k, tl.zeros((Q_PAD, BLOCK), tl.float32), PRECISION)
    store2(follow, qs, j, I, q, I, lerp(load2(follow, qs, j, I, q, I), KUG, FOLLOW))
    UM = lerp(load2(average, ks, j, I, k, I), UG, number(matrix, 0))
    store2(average, ks, j, I, k, I, UM)
    # K_m as `grand` will store it, times Vᵀ
    KmV = product(K_m, ks, q, 1, k, means, j, I, 1, I, q, tl.zeros_like(UG), PRECISION)
    right = UM - lerp(KmV, KV, number(matrix, 0))
    store2(scratch + tl.load(matrix + RIGHT), ks, j, I, k, I, right)


@triton.jit
def root(v, weight, floor):
    """√v̂ + ε and a floor; never 0, so that 0 / 0 is 0."""
    return tl.maximum(tl.sqrt_rn(v / weight) + floor, ROOT_TINY)


@triton.jit
def grand(ok, matrices, scratch, K_PAD: tl.constexpr, Q_PAD: tl.constexpr, STEP: tl.constexpr):
    """One matrix: its grand means and all numbers that the rows share."""
    if tl.load(ok) == 0:
        return
    matrix = matrices + FIELDS * tl.program_id(0).to(tl.int64)
    k, q = size(matrix, K_COLUMNS), size(matrix, Q_COLUMNS)
    O, I = size(matrix, UNITS).to(tl.float32), size(matrix, INPUTS).to(tl.float32)
    w1_rate, wm_rate, wE_rate, eps = number(matrix, 0), number(matrix, 1), number(matrix, 2), number(matrix, 4)
    total = tl.load(scratch + tl.program_id(0))
    means, small = floats(matrix, GRAND_MEANS), scratch + tl.load(matrix + SMALL)
    v_K, v_R, scalars = means + k * q, means + 2 * k * q, means + 2 * k * q + q + k
    v_L, of_R = v_R + q, small + 2 * k * q
    share_c = of_R + 2 * q + k
    variance, rest_variance, factor = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    w1, wm, wE = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    w1, wm, wE = w1 + w1_rate * (1 - w1), wm + wm_rate * (1 - wm), wE + wE_rate * (1 - wE)
    ks, qs = tl.arange(0, K_PAD), tl.arange(0, Q_PAD)
    old_R, old_L = tl.load(v_R + qs, mask=qs < q, other=0.0), tl.load(v_L + ks, mask=ks < k, other=0.0)
    tl.debug_barrier()  # every warp has loaded what is stored below
    noise = tl.sqrt_rn(total) * NOISE

    squares = tl.zeros((STEP, Q_PAD), tl.float32)
    for start in range(0, k, STEP):
        i = start + tl.arange(0, STEP)
        K, K_m, v = load2(small, i, qs, q, k, q), load2(means, i, qs, q, k, q), load2(v_K, i, qs, q, k, q)
        squares += K * K
        K_m, v = lerp(K_m, K, w1_rate), lerp(v, K * K, wm_rate)
        store2(means, i, qs, q, k, q, K_m)
        store2(v_K, i, qs, q, k, q, v)
        store2(small + k * q, i, qs, q, k, q, K_m / root(v, wm, eps + noise))

    SR = tl.load(of_R + qs, mask=qs < q, other=0.0)
    v = lerp(old_R, SR / O, wm_rate)
    tl.store(v_R + qs, v, mask=qs < q)
    tl.store(of_R + q + qs, 1 / root(v, wm, eps + noise / tl.sqrt_rn(O)), mask=qs < q)
    LL = tl.load(share_c + 2 + ks * (k + 1), mask=ks < k, other=0.0)
    v = lerp(old_L, LL / I, wm_rate)
    tl.store(v_L + ks, v, mask=ks < k)
    tl.store(of_R + 2 * q + ks, 1 / root(v, wm, eps + noise / tl.sqrt_rn(I)), mask=ks < k)

    without_V = total - tl.sum(tl.sum(squares, 1), 0) - tl.sum(SR, 0)
    rest = tl.maximum(without_V - tl.sum(LL, 0), 0.0)
    share = rest / without_V
    tl.store(share_c, tl.where(share > 0, tl.minimum(share, 1.0), 0.0))  # 0 for NaN
    lr = tl.load(floats(matrix, LR))
    rate = tl.maximum(lr / GENTLE, 1 / (HIGHEST_FACTOR * HIGHEST_FACTOR))
    highest = tl.maximum(tl.minimum(tl.sqrt(1 / rate), 1 / (rate * GENTLE / LIFT)), LOWEST_FACTOR)
    tl.store(share_c + 1, tl.minimum(factor, highest))
    tl.store(scalars, lerp(variance, total / (O * I), wE_rate))
    tl.store(scalars + 1, lerp(rest_variance, rest / (O * I), wE_rate))
    tl.store(scalars + 3, w1)
    tl.store(scalars + 4, wm)
    tl.store(scalars + 5, wE)


@triton.jit
def direct(
    ok, matrices, blocks, scratch,
    K_PAD: tl.constexpr, Q_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK rows: v_E, then c d and left, by which pass 2 takes the step."""
    if tl.load(ok) == 0:
        return
    matrix = matrices + FIELDS * tl.load(blocks + 2 * tl.program_id(0))
    at = tl.load(blocks + 2 * tl.program_id(0) + 1) * BLOCK
    O, k, q = size(matrix, UNITS), size(matrix, K_COLUMNS), size(matrix, Q_COLUMNS)
    inputs, width, left = size(matrix, INPUTS).to(tl.float32), 2 * k + q + 1, O - at.to(tl.int32)
    r, ks, qs = tl.arange(0, BLOCK), tl.arange(0, K_PAD), tl.arange(0, Q_PAD)
    grand_means, small = floats(matrix, GRAND_MEANS), scratch + tl.load(matrix + SMALL)
    of_R = small + 2 * k * q
    share_c = of_R + 2 * q + k
    means, rows = floats(matrix, UNIT_MEANS) + at * width, scratch + tl.load(matrix + ROWS) + at
    U = load2(means, r, ks, width, left, k)

    ULL = product(means, r, width, 1, left, share_c + 2, ks, k, 1, k, k, tl.zeros_like(U), PRECISION)
    f, length = tl.load(rows + r, mask=r < left, other=0.0), tl.load(rows + O + r, mask=r < left, other=0.0)
    e = tl.maximum(tl.abs(f - tl.sum(ULL * U, 1)), tl.maximum(tl.load(share_c) * f, length * LEAST))
    v_E = tl.load(means + (r * width + width - 1), mask=r < left, other=0.0)
    v_E = lerp(v_E, e / inputs, number(matrix, 2))
    tl.debug_barrier()  # d of every warp is from the old v_E
    tl.store(means + (r * width + width - 1), v_E, mask=r < left)
    noise = tl.sqrt_rn(tl.load(scratch + tl.load(blocks + 2 * tl.program_id(0)))) * NOISE
    wE, c = tl.load(grand_means + 2 * k * q + q + k + 5), tl.load(share_c + 1)
    d = 1 / root(v_E, wE, number(matrix, 4) + noise / tl.sqrt_rn(O * inputs))
    tl.store(rows + 2 * O + r, c * d, mask=r < left)

    MV = load2(means + 2 * k, r, qs, width, left, q)
    of_inputs = MV - product(means, r, width, 1, left, grand_means, qs, q, 1, q, k, tl.zeros_like(MV), PRECISION)
    of_inputs = of_inputs * tl.load(of_R + q + qs, mask=qs < q, other=0.0)[None, :] - d[:, None] * MV
    of_inputs = product(means, r, width, 1, left, small + k * q, qs, q, 1, q, k, of_inputs, PRECISION)
    of_units = U * (tl.load(of_R + 2 * q + ks, mask=ks < k, other=0.0)[None, :] - d[:, None])
    out = scratch + tl.load(matrix + THIN) + at * (q + k)
    store2(out, r, qs, q + k, left, q, c * of_inputs)
    store2(out + q, r, ks, q + k, left, k, c * of_units)


# -------------------------------------------------------------------- pass 2


@triton.jit(do_not_specialize=["first"])
def update(
    ok, matrices, tiles, scratch, first,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, ALIGNED: tl.constexpr, K_PAD: tl.constexpr, Q_PAD: tl.constexpr,
    TILE: tl.constexpr, STRIP: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A strip of columns, TILE rows of it, STEP rows at a time: M ← average of G, θ ← (1 − η w) θ − η c δ."""
    if tl.load(ok) == 0:
        return
    tile = tiles + 3 * (first + tl.program_id(0))
    matrix = matrices + FIELDS * tl.load(tile)
    block, strip = tl.load(tile + 1), tl.load(tile + 2)
    O, I, k, q = size(matrix, UNITS), size(matrix, INPUTS), size(matrix, K_COLUMNS), size(matrix, Q_COLUMNS)
    G = tl.load(matrix + GRAD).to(tl.pointer_type(GRAD_TYPE))
    M = tl.load(matrix + EXP_AVG).to(tl.pointer_type(tl.float32))
    P = tl.load(matrix + PARAM).to(tl.pointer_type(PARAM_TYPE))
    if ALIGNED:
        I, G, M, P = I // 8 * 8, tl.multiple_of(G, 16), tl.multiple_of(M, 16), tl.multiple_of(P, 16)
    columns = (strip * STRIP).to(tl.int32) + tl.arange(0, STRIP)
    ks, qs, r = tl.arange(0, K_PAD), tl.arange(0, Q_PAD), tl.arange(0, STEP)
    V = load2(floats(matrix, INPUT_MEANS), qs, columns, I, q, I)  # (q, STRIP)
    right = load2(scratch + tl.load(matrix + RIGHT), ks, columns, I, k, I)
    left, cd = scratch + tl.load(matrix + THIN), scratch + tl.load(matrix + ROWS) + 2 * O.to(tl.int64)
    lr, w1 = tl.load(floats(matrix, LR)), tl.load(floats(matrix, GRAND_MEANS) + 2 * k * q + q + k + 3)
    rate, decay = lr / w1, 1 - lr * number(matrix, 3)
    w1_rate, sign = number(matrix, 0), number(matrix, 5)
    begin = (block * TILE).to(tl.int32)
    for start in range(begin, tl.minimum(begin + TILE, O), STEP):
        at, rest = block * TILE + (start - begin), O - start
        of_inputs = load2(left + at * (q + k), r, qs, q + k, rest, q)
        of_units = load2(left + at * (q + k) + q, r, ks, q + k, rest, k)
        delta = tl.dot(of_inputs, V, input_precision=PRECISION)
        delta = tl.dot(of_units, right, delta, input_precision=PRECISION)
        g = load2(G + at * I, r, columns, I, rest, I).to(tl.float32)
        m = lerp(load2(M + at * I, r, columns, I, rest, I), sign * g, w1_rate)
        store2(M + at * I, r, columns, I, rest, I, m)
        delta += tl.load(cd + at + r, mask=r < rest, other=0.0)[:, None] * m
        p = load2(P + at * I, r, columns, I, rest, I).to(tl.float32)
        store2(P + at * I, r, columns, I, rest, I, (decay * p - rate * delta).to(PARAM_TYPE))
