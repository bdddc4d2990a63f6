"""Anova's step in C++ against the equations in float64, with dense matrices and nothing shared with the package."""

import math

import numpy as np
import pytest
import torch

from blockmean import Anova
from blockmean.optim import kernels
from blockmean.optim.decomposition import max_factor

if not kernels.is_available():
    pytest.skip("the kernels were not built", allow_module_level=True)

from blockmean.optim.kernels.anova import NativeMatrices, serves

NUMBERS = {
    "beta1": 0.9,
    "mean_beta": 0.95,
    "beta2": 0.99,
    "lr": 2e-3,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "sign": 1.0,
}
ROUNDING = 2.0**-24
SHAPES = [  # O, I, k, q
    (1, 1, 1, 1),
    (3, 7, 2, 1),
    (7, 3, 1, 3),
    (8, 48, 8, 16),
    (17, 49, 5, 3),
    (50, 33, 0, 4),
    (33, 50, 4, 0),
    (16, 16, 16, 16),
    (20, 9, 20, 9),
    (64, 64, 16, 16),
    (64, 100, 16, 16),
    (129, 95, 17, 33),
    (400, 61, 9, 31),
    (900, 40, 6, 4),
]
SETS = ["plain", "avx2", "avx512"]


@pytest.fixture(params=SETS)
def instructions(request):
    best = kernels.instructions()
    try:
        kernels.instructions(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    kernels.instructions(best)


# -------------------------------------------------------------------- the equations


def adam_bound(beta1, beta2, t):
    """The largest |m̂| / √v̂ over all gradients of t steps: the norm of m's weights over the roots of v's."""
    age = np.arange(t)
    m, v = (1 - beta1) * beta1**age / (1 - beta1**t), (1 - beta2) * beta2**age / (1 - beta2**t)
    return math.sqrt((m**2 / v).sum())


def lerp(a, b, weight):
    return a + weight * (b - a)


def root(v, w, floor):
    return np.maximum(np.sqrt(v / w) + floor, math.sqrt(2.0**-126))


class Reference:
    """One matrix in float64, with every matrix that the equations name."""

    def __init__(self, theta, state, k, q):
        I = theta.shape[1]
        self.k, self.q, self.theta, self.M = k, q, theta.copy(), state["exp_avg"].copy()
        unit, inputs, grand = state["unit_means"], state["input_means"].reshape(2 * q + k, I), state["grand_means"]
        self.U, self.X, self.MV, self.v_E = unit[:, :k], unit[:, k : 2 * k], unit[:, 2 * k : 2 * k + q], unit[:, -1]
        self.V, self.Y, self.UM = inputs[:q].T, inputs[q : 2 * q].T, inputs[2 * q :]
        ends = np.cumsum([k * q, k * q, q, k])
        K, v_K, self.v_R, self.v_L, scalars = np.split(grand, ends)
        self.K, self.v_K = K.reshape(k, q), v_K.reshape(k, q)
        self.variance, self.rest_variance, self.factor, self.w1, self.wm, self.wE = scalars

    def state(self):
        scalars = [self.variance, self.rest_variance, self.factor, self.w1, self.wm, self.wE]
        return {
            "theta": self.theta,
            "exp_avg": self.M,
            "unit_means": np.concatenate([self.U, self.X, self.MV, self.v_E[:, None]], 1),
            "input_means": np.concatenate([self.V.T, self.Y.T, self.UM]),
            "grand_means": np.concatenate([self.K.ravel(), self.v_K.ravel(), self.v_R, self.v_L, scalars]),
        }

    def squares(self, A, AV, UA, K):
        """Sums of squares of R (by column), L Lᵀ, E (all of it, and by row)."""
        R, L = AV - self.U @ K, UA - K @ self.V.T
        rows = (A**2).sum(1)
        SR, LL = (R**2).sum(0), L @ L.T
        without_V = rows.sum() - (K**2).sum() - SR.sum()
        rest = max(without_V - np.trace(LL), 0.0)
        share = min(max(rest / without_V, 0.0), 1.0) if without_V else 0.0
        f = rows - (AV**2).sum(1)
        estimate = np.abs(f - np.einsum("ia,ab,ib->i", self.U, LL, self.U))
        return SR, LL, rest, np.maximum(np.maximum(estimate, share * f), 2.0**-18 * rows)

    def step(self, G, n):
        O, I = G.shape
        b1, bm, b2 = n["beta1"], n["mean_beta"], n["beta2"]
        G = n["sign"] * G
        total = (G**2).sum()
        self.w1, self.wm, self.wE = (w + (1 - b) * (1 - w) for w, b in ((self.w1, b1), (self.wm, bm), (self.wE, b2)))
        GV, UG = G @ self.V, self.U.T @ G
        K = self.U.T @ GV
        SR, LL, rest, e = self.squares(G, GV, UG, K)
        noise = 2.0**-19 * math.sqrt(total + self.v_K.sum() + O * self.v_R.sum() + I * self.v_L.sum())
        self.MV, self.UM, self.K = lerp(self.MV, GV, 1 - b1), lerp(self.UM, UG, 1 - b1), lerp(self.K, K, 1 - b1)
        self.v_K, self.v_R = lerp(self.v_K, K**2, 1 - bm), lerp(self.v_R, SR / O, 1 - bm)
        self.v_L, self.v_E = lerp(self.v_L, np.diag(LL) / I, 1 - bm), lerp(self.v_E, e / I, 1 - b2)
        self.variance = lerp(self.variance, total / (O * I), 1 - b2)
        self.rest_variance = lerp(self.rest_variance, rest / (O * I), 1 - b2)
        self.X, self.Y = lerp(self.X, GV @ K.T, 0.05), lerp(self.Y, UG.T @ K, 0.05)
        rK, rR, rL, rE = self.roots(n["eps"], noise, (O, I))
        c = min(max(self.factor, 0.7), max(min((3e-2 / max(n["lr"], 7.5e-5)) ** 0.5, 7e-3 / max(n["lr"], 7.5e-5)), 0.7))
        self.M = lerp(self.M, G, 1 - b1)
        # δ as the four parts of M, each over its own root
        U, V, K, MV, UM = self.U, self.V, self.K, self.MV, self.UM
        R, L = MV - U @ K, UM - K @ V.T
        E = self.M - MV @ V.T - U @ L
        sigma = math.sqrt(self.variance / self.wE) + n["eps"]
        lifted = np.maximum(c / rK, np.minimum((K / rK / self.w1) ** 2, 1) / sigma)
        delta = U @ (lifted * K) @ V.T + c * ((R / rR) @ V.T + U @ (L / rL[:, None]) + E / rE[:, None])
        self.theta = (1 - n["lr"] * n["weight_decay"]) * self.theta - n["lr"] / self.w1 * delta

    def roots(self, eps, noise, shape):
        O, I = shape
        v = (self.v_K, self.wm, 1), (self.v_R, self.wm, O), (self.v_L, self.wm, I), (self.v_E, self.wE, O * I)
        return [root(x, w, eps + noise / math.sqrt(size)) for x, w, size in v]

    def refresh(self, n, bound_means, bound_rest):
        (O, I), M, U, V = self.M.shape, self.M, self.U, self.V
        new = [turned(S, W) for S, W in ((self.X, U), (self.Y, V))]
        if all(x is not None for x in new):
            self.U, self.V = new
            by_U, by_V = (U.T @ self.U) ** 2, (V.T @ self.V) ** 2
            self.v_K, self.v_R, self.v_L = by_U.T @ self.v_K @ by_V, self.v_R @ by_V, self.v_L @ by_U
            self.X, self.Y = self.U @ (self.U.T @ self.X), self.V @ (self.V.T @ self.Y)
            self.MV, self.UM, self.K = M @ self.V, self.U.T @ M, self.U.T @ M @ self.V
        SR, LL, rest, e = self.squares(M, self.MV, self.UM, self.K)
        squares = {"v_K": self.K**2, "v_R": SR / O, "v_L": np.diag(LL) / I, "v_E": e / I}
        for name, square in squares.items():
            bound, w = (bound_rest, self.wE) if name == "v_E" else (bound_means, self.wm)
            setattr(self, name, np.maximum(getattr(self, name), square * (w / (bound * self.w1) ** 2)))
        rK, rR, rL, _ = self.roots(n["eps"], 0.0, (O, I))
        total = (M**2).sum()
        gain = (self.K**2 / rK).sum() + (SR / rR).sum() + (np.diag(LL) / rL).sum()
        of_rest = max(rest - 2.0**-18 * total, 0.0)
        gain += of_rest / math.sqrt(self.rest_variance / self.wE) if of_rest else 0.0
        if total:
            factor = total / math.sqrt(self.variance / self.wE) / gain
            self.factor = lerp(self.factor, min(max(factor, 0.7), 20.0), 0.2)


def turned(S, W):
    """Columns of the sketch at unit length with a little of the old ones, made orthonormal one after the other."""
    length = np.linalg.norm(S, axis=0)
    unit = np.where(length > 2.0**-19 * length.max(initial=0), 1 / np.where(length > 0, length, 1), 0.0)
    Z = S * unit + 1e-3 * W
    Q, R = np.linalg.qr(Z)
    signs = np.where(np.diag(R) < 0, -1.0, 1.0)
    return None if (np.abs(np.diag(R)) <= 1e-5).any() else Q * signs


# -------------------------------------------------------------------- problems


def problem(shape, dtype, seed, noise=1.0):
    """A parameter and the state of a matrix after its start, and gradients of low rank with noise."""
    O, I, k, q = shape
    rng = np.random.default_rng(seed)
    U, V = (np.linalg.qr(rng.standard_normal((n, w)))[0] for n, w in ((O, k), (I, q)))
    unit, inputs = np.zeros((O, 2 * k + q + 1)), np.zeros((2 * q + k, I))
    unit[:, :k], inputs[:q] = U, V.T
    grand = np.zeros(2 * k * q + q + k + 6)
    grand[-4] = 0.7 + rng.random()
    state = {"exp_avg": np.zeros((O, I)), "unit_means": unit, "input_means": inputs, "grand_means": grand}
    state = {name: torch.tensor(x, dtype=torch.float32) for name, x in state.items()}
    param = torch.tensor(rng.standard_normal((O, I)), dtype=dtype)
    rank = max(k, q)
    base = rng.standard_normal((O, rank)) @ rng.standard_normal((rank, I))
    scales = np.exp(rng.standard_normal((O, 1)))
    grads = [
        torch.tensor(1e-2 * scales * (base * rng.random() + noise * rng.standard_normal((O, I))), dtype=dtype)
        for _ in range(6)
    ]
    return param, state, grads


def copied(param, state):
    return param.clone(), {name: x.clone() for name, x in state.items()}


def native(problems, grads, numbers=NUMBERS, refresh=(), bounds=(2.0, 3.0), kept=None):
    params, states = zip(*problems, strict=True)
    refreshes = refresh or [False] * len(params)
    return NativeMatrices(
        params, grads, states, numbers, refreshes, [bounds] * len(params), {} if kept is None else kept
    )


def compare(state, param, reference, scale):
    """Entries to `scale` rounding errors of the largest of their kind; squares also of what they are differences of."""
    k, q, (O, I) = reference.k, reference.q, param.shape
    cuts = {
        "exp_avg": (0, []),
        "unit_means": (1, [k, 2 * k, 2 * k + q]),
        "input_means": (0, [q, 2 * q]),
        "grand_means": (0, np.cumsum([k * q, k * q, q, k, 1, 1, 1, 1, 1])),
    }
    whole = reference.variance
    floors = {("unit_means", 3): whole * O, ("grand_means", 2): whole * I, ("grand_means", 3): whole * O}
    floors |= {("grand_means", 5): whole}
    expected = reference.state()
    for name, (axis, at) in cuts.items():
        both = (np.split(x, at, axis) for x in (state[name].double().numpy(), expected[name]))
        for i, (a, b) in enumerate(zip(*both, strict=True)):
            size = max(np.abs(b).max(initial=0), floors.get((name, i), 0.0))
            np.testing.assert_allclose(a, b, rtol=0, atol=scale * ROUNDING * size, err_msg=f"{name}, part {i}")
    error = np.abs(expected["theta"] - param.double().numpy()).max()
    precision = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[param.dtype]
    # Where U or V is square, R or L is rounding error only, of which a step takes a part, times the largest factor.
    of_step = 1 / 4 if k == O or q == I else scale * ROUNDING
    longest = 3 * NUMBERS["lr"] * max_factor(NUMBERS["lr"])
    assert error <= (precision + ROUNDING) * np.abs(expected["theta"]).max() + of_step * longest


def numpy_state(state):
    return {name: x.double().numpy() for name, x in state.items()}


# -------------------------------------------------------------------- tests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_agree_with_the_equations(shape, dtype, instructions):
    """Each from the state that the kernels had before: then rounding errors do not add up."""
    param, state, grads = problem(shape, dtype, 0)
    for t, grad in enumerate(grads):
        numbers = NUMBERS if t < 3 else {**NUMBERS, "sign": -1.0, "lr": 1e-4, "weight_decay": 0.0}
        reference = Reference(param.double().numpy(), numpy_state(state), *shape[2:])
        reference.step(grad.double().numpy(), numbers)
        step = native([(param, state)], [grad], numbers)
        assert serves(param, grad, state) == all(shape[2:]) and step.read().isfinite() and step.write() == []
        compare(state, param, reference, 200)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_refreshes_agree_with_the_equations(shape, instructions):
    k, q = shape[2:]
    param, state, grads = problem(shape, torch.float32, 1, noise=0.3)
    for t, grad in enumerate(grads):
        refresh = t % 2 == 1
        bounds = adam_bound(0.9, 0.95, t + 1), adam_bound(0.9, 0.99, t + 1)
        reference = Reference(param.double().numpy(), numpy_state(state), k, q)
        reference.step(grad.double().numpy(), NUMBERS)
        if refresh:
            reference.refresh(NUMBERS, *bounds)
        step = native([(param, state)], [grad], refresh=[refresh], bounds=bounds)
        assert step.read().isfinite() and step.write() == []
        compare(state, param, reference, 20_000 if refresh else 200)


def several(seed):
    """Matrices large and small, of all dtypes."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    return [problem(shape, dtypes[i % 3], seed + i) for i, shape in enumerate(SHAPES * 2)]


def run(problems, threads, steps=3):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        own, kept = [copied(param, state) for param, state, _ in problems], {}
        for t in range(steps):
            refresh = [t == 1] * len(own)
            step = native(own, [grads[t] for *_, grads in problems], refresh=refresh, kept=kept)
            assert step.read().isfinite() and step.write() == []
    finally:
        torch.set_num_threads(before)
    return [x for param, state in own for x in (param, *state.values())]


@pytest.mark.parametrize("last", [len(SHAPES) * 2, 1], ids=["many", "one"])
def test_the_number_of_threads_changes_no_bit(last, instructions):
    """Many matrices are taken one by one, a single one in chunks of rows."""
    problems = several(2)[:last] if last > 1 else [problem((900, 40, 6, 4), torch.float32, 3)]
    expected = run(problems, 1)
    for threads in (2, 5):
        for a, b in zip(expected, run(problems, threads), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    problems = several(4)
    own, grads = [copied(param, state) for param, state, _ in problems], [grads[0] for *_, grads in problems]
    where = SHAPES.index((64, 64, 16, 16))
    grads[where] = grads[where].clone()
    grads[where][5, 63] = bad
    assert not native(own, grads).read().isfinite()
    for (param, state), (old, before, _) in zip(own, problems, strict=True):
        assert torch.equal(param, old) and all(torch.equal(state[name], x) for name, x in before.items())


def test_zero_gradients_leave_only_weight_decay(instructions):
    param, state, _ = problem((33, 50, 4, 3), torch.float32, 5)
    old = param.clone()
    for refresh in (False, True):
        step = native([(param, state)], [torch.zeros_like(param)], refresh=[refresh])
        assert step.read().isfinite() and step.write() == []
    decay = (1 - NUMBERS["lr"] * NUMBERS["weight_decay"]) ** 2
    torch.testing.assert_close(param, old * decay, rtol=1e-6, atol=0)
    assert all(x.isfinite().all() for x in state.values())


@pytest.mark.parametrize("side", ["unit_means", "input_means"])
def test_a_refresh_with_a_zero_column_is_left_to_torch(side):
    """The step itself is taken; U, V and what follows from a turn stay."""
    problems = [problem((64, 64, 16, 16), torch.float32, seed) for seed in (6, 7)]
    own = [(param, state) for param, state, _ in problems]
    (own[1][1][side][:, 2] if side == "unit_means" else own[1][1][side][2]).zero_()
    alone, before = copied(*own[1]), [state["unit_means"][:, :16].clone() for _, state in own]
    grads = [grads[0] for *_, grads in problems]
    step = native(own, grads, refresh=[True, True])
    assert step.read().isfinite() and step.write() == [1]
    last = native([alone], grads[1:])
    assert last.read().isfinite() and last.write() == []
    assert all(torch.equal(alone[1][name], x) for name, x in own[1][1].items()) and torch.equal(alone[0], own[1][0])
    assert not torch.equal(own[0][1]["unit_means"][:, :16], before[0])


def test_nearly_parallel_columns_stay_where_they_are(instructions):
    """Second moments are bounded all the same, and c is chosen."""
    shape = (40, 30, 3, 2)
    param, state, grads = problem(shape, torch.float32, 8)
    state["unit_means"][:, 1] = state["unit_means"][:, 0]
    reference = Reference(param.double().numpy(), numpy_state(state), 3, 2)
    reference.step(grads[0].double().numpy(), NUMBERS)
    columns = state["unit_means"][:, :3].clone()
    reference.X[:, 1] = reference.X[:, 0]  # equal in exact arithmetic
    reference.refresh(NUMBERS, 2.0, 3.0)
    step = native([(param, state)], [grads[0]], refresh=[True])
    assert step.read().isfinite() and step.write() == []
    assert torch.equal(state["unit_means"][:, :3], columns)
    compare(state, param, reference, 20_000)


def test_what_the_kernels_do_not_serve():
    param, state, (grad, *_) = problem((8, 6, 2, 2), torch.float32, 9)
    assert serves(param, grad, state)
    assert not serves(param.double(), grad.double(), state)
    assert not serves(param, grad.bfloat16(), state)
    assert not serves(param, grad, {**state, "exp_avg": state["exp_avg"].T.contiguous().T})
    assert not serves(param, grad.to_sparse(), state)
    assert not serves(param, grad, {**state, "exp_avg": state["exp_avg"].double()})


def test_convolutions_in_channels_last_take_the_same_step():
    shape = (24, 9, 3, 3)
    param, state, grads = problem((24, 81, 8, 8), torch.float32, 10)
    state["input_means"] = state["input_means"].view(-1, *shape[1:])
    state["exp_avg"] = state["exp_avg"].view(shape)
    expected, given = copied(param.view(shape), state), copied(param.view(shape), state)
    given = moved, _ = given[0].to(memory_format=torch.channels_last), given[1]
    for grad in grads[:2]:
        grad = grad.view(shape)
        steps = native([expected], [grad]), native([given], [grad.to(memory_format=torch.channels_last)])
        assert serves(given[0], grad, state) and all(step.read().isfinite() and step.write() == [] for step in steps)
    assert moved.is_contiguous(memory_format=torch.channels_last) and torch.equal(moved, expected[0])
    assert all(torch.equal(given[1][name], x) for name, x in expected[1].items())


def steps_of(scales, shape=(60, 50), **options):
    """A matrix after steps with gradients of these sizes."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32))
    optimizer = Anova([param], lr=1e-3, weight_decay=0.0, **options)
    for scale in scales:
        param.grad = scale * torch.randn(shape, generator=generator, dtype=torch.float32)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_plays_no_part(dtype):
    expected = steps_of([1.0] * 7)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(steps_of([1.0] * 7), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_average_without_memory_forgets_a_spike():
    sizes, options = [1.0, 1.0, 1e4, 1.0], {"betas": (0.0, 0.0), "mean_beta": 0.0}
    native, plain = (steps_of(sizes, fused=fused, **options) for fused in (None, False))
    assert (native - plain).abs().max() < 1e-3  # one step; without care, thousands
