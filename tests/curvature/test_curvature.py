"""Fisher, Gauss-Newton and Hessian in block-mean form against dense matrices and against curvlinops."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from blockmean import BlockMean, Partition
from blockmean.curvature import empirical_fisher, fisher, ggn, hessian
from support import reference
from support.problems import data, small_net

# Derivatives of a small net in float64, found two ways: 1e-8 leaves six digits for rounding.
TOLERANCE = 1e-8
PARTITIONS = ("tensor", "unit", "kernel", "module", "element", "all")
CROSS_ENTROPY = partial(F.cross_entropy, reduction="sum")
SQUARES = partial(F.mse_loss, reduction="sum")
EXACT = {
    "empirical_fisher": empirical_fisher,
    "fisher": fisher,
    "ggn": partial(ggn, num_probes=None),
    "hessian": partial(hessian, num_probes=None),
}


# ---------------------------------------------------------------- dense twins, by plain autograd


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def jacobian_rows(values, params):
    """The gradient of each value, (number of values, d)."""
    rows = [torch.autograd.grad(v, params, retain_graph=True, allow_unused=True) for v in values]
    return torch.stack(
        [flat([torch.zeros_like(p) if g is None else g for g, p in zip(row, params, strict=True)]) for row in rows]
    )


def output_hessian(loss_fn, out, y):
    """∇² of the loss of one sample in its outputs, (C, C)."""
    return torch.autograd.functional.hessian(lambda o: loss_fn(o, y), out).reshape(out.numel(), -1)


def dense(name, model, loss_fn, x, y, params=None):
    """The sum over samples of the matrix, d × d; single samples as batches of one."""
    params = list(model.parameters()) if params is None else params
    M = 0
    for n in range(len(x)):
        out, target = model(x[n : n + 1]), y[n : n + 1]
        loss = loss_fn(out, target)
        if name == "empirical_fisher":
            g = jacobian_rows([loss], params)
            M = M + g.mT @ g
        elif name == "hessian":
            g = flat(torch.autograd.grad(loss, params, create_graph=True))
            M = M + jacobian_rows(g, params)
        else:  # the Fisher matrix of these losses is their Gauss-Newton matrix
            J = jacobian_rows(out.flatten(), params)
            M = M + J.mT @ output_hessian(loss_fn, out.detach(), target) @ J
    return M.numpy()


def assert_block_mean_of(found, M, tolerance=TOLERANCE):
    blocks = reference.blocks_of(found.partition.labels.tolist())
    lam, B = reference.proposition_1(M, blocks)
    reference.assert_close(found.matrix.lam, lam, tolerance)
    reference.assert_close(found.matrix.B, B, tolerance)
    reference.assert_close(found.matrix.A, reference.canonical(lam, B, blocks), tolerance)


@pytest.fixture
def problem():
    torch.manual_seed(1)  # no unit is dead
    model = small_net()
    return model, *data(seed=1, n=7, size=4, classes=5)


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("by", PARTITIONS)
@pytest.mark.parametrize("name", EXACT)
def test_equals_proposition_1_on_the_dense_matrix(name, by, problem):
    model, x, y = problem
    found = EXACT[name](model, F.cross_entropy, (x, y), by)
    assert isinstance(found.matrix, BlockMean)
    assert found.matrix.dtype == torch.float64
    assert found.partition == Partition.of(model, by)
    M = dense(name, model, F.cross_entropy, x, y) / len(x)
    assert np.abs(np.diag(M)).min() > 0
    assert_block_mean_of(found, M)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", EXACT)
def test_squared_errors(name, reduction, problem):
    model, x, _ = problem
    y = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    loss_fn = partial(F.mse_loss, reduction=reduction)
    found = EXACT[name](model, loss_fn, (x, y), "unit", reduction=reduction)
    M = dense(name, model, loss_fn, x, y)
    assert_block_mean_of(found, M / 7 if reduction == "mean" else M)


@pytest.mark.parametrize("name", EXACT)
def test_a_sum_is_n_times_the_mean(name, problem):
    model, x, y = problem
    mean = EXACT[name](model, nn.CrossEntropyLoss(), (x, y))
    total = EXACT[name](model, nn.CrossEntropyLoss(reduction="sum"), (x, y), reduction="sum")
    reference.assert_close((mean.matrix * 7).A, total.matrix.A, 1e-12)
    reference.assert_close((mean.matrix * 7).lam, total.matrix.lam, 1e-12)


@pytest.mark.parametrize("name", EXACT)
def test_batches_of_any_sizes_count_each_sample_alike(name, problem):
    model, x, y = problem
    truth = dense(name, model, F.cross_entropy, x, y) / 7
    batches = list(zip(x.split([1, 4, 2]), y.split([1, 4, 2]), strict=True))
    empty = (x[:0], y[:0])
    assert_block_mean_of(EXACT[name](model, F.cross_entropy, [empty, *batches, empty]), truth)
    assert_block_mean_of(EXACT[name](model, F.cross_entropy, iter(batches)), truth)  # walked once
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3, shuffle=True)
    assert_block_mean_of(EXACT[name](model, F.cross_entropy, loader), truth)


@pytest.mark.parametrize("name", EXACT)
def test_chunks_change_nothing_but_rounding(name, problem):
    model, x, y = problem
    whole = EXACT[name](model, F.cross_entropy, (x, y), "unit")
    for chunk_size in (1, 3, 7, 100):
        parts = EXACT[name](model, F.cross_entropy, (x, y), "unit", chunk_size=chunk_size)
        reference.assert_close(parts.matrix.A, whole.matrix.A, 1e-12)
        reference.assert_close(parts.matrix.lam, whole.matrix.lam, 1e-12)


@pytest.mark.parametrize("name", EXACT)
def test_a_subset_of_the_parameters(name, problem):
    model, x, y = problem
    chosen = [model[2].weight, model[5].bias]
    truth = dense(name, model, F.cross_entropy, x, y, chosen) / 7
    by_name = EXACT[name](model, F.cross_entropy, (x, y), "kernel", params=["5.bias", "2.weight"])  # order: the model's
    assert_block_mean_of(by_name, truth)
    by_predicate = EXACT[name](
        model, F.cross_entropy, (x, y), params=lambda name, p: name == "5.bias" or (p.ndim == 4 and name[0] == "2")
    )
    assert_block_mean_of(by_predicate, truth)
    for p in model.parameters():
        p.requires_grad_(any(p is other for other in chosen))
    frozen = EXACT[name](model, F.cross_entropy, (x, y), Partition.of(chosen))
    assert_block_mean_of(frozen, truth)


class Tied(nn.Module):
    """An encoder whose weights the decoder uses again."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


@pytest.mark.parametrize("params", [None, ["decode.weight", "decode.bias"]])
@pytest.mark.parametrize("name", EXACT)
def test_tied_parameters_count_once(name, params):
    torch.manual_seed(0)
    model = Tied().double()
    x, y = torch.randn(4, 3).double(), torch.tensor([0, 2, 1, 1])
    found = EXACT[name](model, F.cross_entropy, (x, y), params=params)
    chosen = None if params is None else [model.encode.weight, model.decode.bias]
    assert found.partition.num_entries == (15 if params is None else 12)
    assert_block_mean_of(found, dense(name, model, F.cross_entropy, x, y, chosen) / 4)


@pytest.mark.parametrize("name", EXACT)
def test_a_partition_whose_blocks_interleave(name, problem):
    model, x, y = problem
    d = sum(p.numel() for p in model.parameters())
    labels = torch.randperm(d, generator=torch.Generator().manual_seed(3)) % 4
    found = EXACT[name](model, F.cross_entropy, (x, y), Partition.from_labels(labels))
    assert_block_mean_of(found, dense(name, model, F.cross_entropy, x, y) / 7)


@pytest.mark.parametrize("name", EXACT)
def test_outputs_with_positions(name):
    """Cross-entropy over several labels per sample, whose mean over positions is part of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh()).double()
    x, y = torch.randn(3, 2, 5).double(), torch.randint(3, (3, 4))
    for reduction, n in (("mean", 3), ("sum", 1)):
        loss_fn = partial(F.cross_entropy, reduction=reduction)
        found = EXACT[name](model, loss_fn, (x, y), "unit", reduction=reduction)
        assert_block_mean_of(found, dense(name, model, loss_fn, x, y) / n)


def test_a_loss_that_is_not_convex():
    """The Hessian of the loss in the outputs is indefinite; so is the Gauss-Newton matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = torch.randn(5, 2).double(), torch.randn(5, 2).double()

    def loss_fn(out, target):
        return (torch.sin(2 * out) * target).sum(1).mean()

    M = dense("ggn", model, loss_fn, x, y) / 5
    assert np.linalg.eigvalsh(M).min() < -0.1
    assert_block_mean_of(ggn(model, loss_fn, (x, y), "unit"), M)


@pytest.mark.parametrize("name", ["empirical_fisher", "ggn", "hessian"])
def test_models_with_several_inputs(name):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x, z):
            return self.a(x) * torch.tanh(self.b(z))

    torch.manual_seed(0)
    model = Sum().double()
    x, z, y = torch.randn(5, 2).double(), torch.randn(5, 2).double(), torch.randint(3, (5,))
    positional = EXACT[name](model, F.cross_entropy, [((x, z), y)])
    by_keyword = EXACT[name](
        model, F.cross_entropy, [({"z": z[:2], "x": x[:2]}, y[:2]), ({"z": z[2:], "x": x[2:]}, y[2:])]
    )
    reference.assert_close(positional.matrix.A, by_keyword.matrix.A, 1e-12)
    reference.assert_close(positional.matrix.lam, by_keyword.matrix.lam, 1e-12)


def test_float32_agrees_with_float64(problem):
    model, x, y = problem
    for name, function in EXACT.items():
        exact = function(model, F.cross_entropy, (x, y), "unit")
        single = function(copy.deepcopy(model).float(), F.cross_entropy, (x.float(), y), "unit")
        assert single.matrix.dtype == torch.float32, name
        reference.assert_close(single.matrix.A.double(), exact.matrix.A, 1e-5)
        reference.assert_close(single.matrix.lam.double(), exact.matrix.lam, 1e-5)


def test_batch_normalisation_that_is_evaluated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 3).double(), torch.randint(3, (6,))
    model(x)
    model.eval()
    for name, function in EXACT.items():
        assert_block_mean_of(function(model, F.cross_entropy, (x, y)), dense(name, model, F.cross_entropy, x, y) / 6)


class Attention(nn.Module):
    """A transformer on token numbers, with a label at every position."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(3, 4), nn.Linear(4, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        return self.out(self.layer(self.embed(tokens))).mT


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.memory, self.out = kind(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.out(self.memory(x)[0][:, -1])


ARCHITECTURES = {
    "attention": lambda: (Attention(), torch.randint(3, (3, 2)), torch.randint(3, (3, 2))),
    "attention, evaluated": lambda: (Attention().eval(), torch.randint(3, (3, 2)), torch.randint(3, (3, 2))),
    "LSTM": lambda: (Recurrent(nn.LSTM), torch.randn(3, 2, 2).double(), torch.randint(3, (3,))),
    "GRU": lambda: (Recurrent(nn.GRU), torch.randn(3, 2, 2).double(), torch.randint(3, (3,))),
    "norms": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.GELU(), nn.InstanceNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
        ),
        torch.randn(3, 1, 3, 3).double(),
        torch.randint(3, (3,)),
    ),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", EXACT)
def test_architectures(name, architecture):
    torch.manual_seed(0)
    model, x, y = ARCHITECTURES[architecture]()
    model = model.double()
    # λ of a hundred entries, each with a Hessian-vector product, would take long.
    function = partial(hessian, num_probes=1) if name == "hessian" else EXACT[name]
    fast = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.is_available()
    found = function(model, F.cross_entropy, (x, y), norm_probes=1)
    assert fast == (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.is_available())
    # Plain kernels for the dense twin too: the fast ones have no second derivative.
    plain = torch.backends.mkldnn.flags(enabled=False, deterministic=None, allow_tf32=None)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), plain:
        M = dense(name, model, F.cross_entropy, x, y) / 3
    exact = ~found.report.estimated
    lam, B = reference.proposition_1(M, reference.blocks_of(found.partition.labels.tolist()))
    A = reference.canonical(lam, B, reference.blocks_of(found.partition.labels.tolist()))
    reference.assert_close(found.matrix.A, A, TOLERANCE)
    reference.assert_close(found.matrix.lam[exact], lam[exact.numpy()], TOLERANCE)


def test_half_precision_parameters_give_a_float32_matrix():
    model = nn.Linear(4, 3).bfloat16()
    x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.arange(6) % 3
    for name, function in EXACT.items():
        found = function(model, F.cross_entropy, (x, y), "unit")
        exact = function(copy.deepcopy(model).double(), F.cross_entropy, (x.double(), y), "unit")
        assert found.matrix.dtype == torch.float32, name
        reference.assert_close(found.matrix.A.double(), exact.matrix.A, 0.05)  # bfloat16 has 8 bits


# ---------------------------------------------------------------- an independent library


@pytest.mark.parametrize(
    ("name", "operator"),
    [("empirical_fisher", "EFLinearOperator"), ("ggn", "GGNLinearOperator"), ("hessian", "HessianLinearOperator")],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss])
def test_agrees_with_curvlinops(name, operator, reduction, loss, problem):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its dependencies warn about torch.jit when they are imported
        curvlinops = pytest.importorskip("curvlinops")
    model, x, y = problem
    if loss is nn.MSELoss:
        y = F.one_hot(y, 5).double()
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    loss_fn = loss(reduction=reduction)
    params = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        M = getattr(curvlinops, operator)(model, loss_fn, list(params.values()), batches) @ torch.eye(
            sum(p.numel() for p in params.values()), dtype=torch.float64
        )
    if name == "empirical_fisher" and isinstance(loss_fn, nn.MSELoss) and reduction == "mean":
        M = M / 5  # curvlinops has 1/(N·C) Σ g gᵀ with g the gradient of the *sum* of C squares; ours is of their mean
    found = EXACT[name](model, loss_fn, batches, "kernel", reduction=reduction)
    assert_block_mean_of(found, M.detach().numpy())
