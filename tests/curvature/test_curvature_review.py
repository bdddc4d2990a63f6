"""Curvature where data is uneven, labels are ignored, layers are odd and losses are not what they are said to be."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_curvature import EXACT, assert_block_mean_of, dense
from torch import nn
from torch.nn import functional as F

from blockmean.curvature import empirical_fisher, fisher, ggn, hessian
from support import reference
from support.problems import data, small_net

FUNCTIONS = [empirical_fisher, fisher, ggn, hessian]
each = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
by_name = pytest.mark.parametrize("name", EXACT)


def tagger():
    """Three classes at every position but one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 3, 1)).double()


def sequences(n, length, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, length, generator=random).double()
    return x, torch.randint(3, (n, length - 1), generator=random)


def classifier(*extra):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), *extra, nn.Tanh(), nn.Linear(4, 3)).double()


# ---------------------------------------------------------------- uneven data


@by_name
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("lengths", [(3, 7), (7, 3)])
def test_batches_of_sequences_of_other_lengths(name, reduction, lengths):
    model, loss_fn = tagger(), partial(F.cross_entropy, reduction=reduction)
    batches = [sequences(3, lengths[0]), sequences(2, lengths[1])]
    M = sum(dense(name, model, loss_fn, x, y) for x, y in batches)
    found = EXACT[name](model, loss_fn, batches, "unit", reduction=reduction)
    assert_block_mean_of(found, M / 5 if reduction == "mean" else M)


def test_the_report_of_batches_of_other_lengths():
    model, short, long = tagger(), sequences(3, 3), sequences(2, 7)
    assert "κ = 0.166667 to 0.5, N = 5" in fisher(model, F.cross_entropy, [short, long]).report.equation
    for batches in ([short, long], [long, short]):  # six outputs per sample, and eighteen
        found = ggn(model, F.cross_entropy, batches, num_probes=6)
        assert found.report.probes == 6
        assert found.report.estimated.all()
    # λ of the short sequences is exact: the error is that of the two long ones.
    alone = ggn(model, F.cross_entropy, [long], num_probes=6).report.lam_error * 2 / 5
    reference.assert_close(ggn(model, F.cross_entropy, [long, short], num_probes=6).report.lam_error, alone, 1e-12)


@by_name
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_labels(name, reduction):
    model, (x, y) = tagger(), sequences(4, 5)
    y[:, 1] = -7
    loss_fn = nn.CrossEntropyLoss(reduction=reduction, ignore_index=-7)
    M = dense(name, model, loss_fn, x, y)
    found = EXACT[name](model, loss_fn, (x, y), "unit", reduction=reduction)
    assert_block_mean_of(found, M / 4 if reduction == "mean" else M)


def test_ignored_labels_are_not_sampled():
    model, (x, y) = tagger(), sequences(4, 5)
    y[:, 1:] = -100
    sampled = fisher(model, F.cross_entropy, (x, y), labels="sampled", num_probes=2)
    first = fisher(model, F.cross_entropy, (x[..., :2], y[:, :1]), labels="sampled", num_probes=2)
    assert sampled.report.equation == first.report.equation
    truth = fisher(model, F.cross_entropy, (x[..., :2], y[:, :1]))
    seeds = [torch.Generator().manual_seed(seed) for seed in range(100)]
    A = torch.stack([fisher(model, F.cross_entropy, (x, y), labels="sampled", generator=g).matrix.A for g in seeds])
    # Off by more than 5 standard errors of 100 runs in one of a million cases.
    assert ((A.mean(0) - truth.matrix.A).abs() <= 5 * A.std(0) / 10 + 1e-12).all()


@each
def test_several_inputs_need_no_list_of_batches(function):
    class Gate(nn.Linear):
        def forward(self, x, z):
            return super().forward(x) * z

    model = Gate(3, 3).double()
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(6) % 3
    z = x.cos()
    expected = function(model, F.cross_entropy, [((x, z), y)])
    for inputs in ((x, z), {"x": x, "z": z}):
        assert torch.equal(function(model, F.cross_entropy, (inputs, y)).matrix.A, expected.matrix.A)


@each
def test_names_from_an_iterator(function):
    model, x, y = classifier(), torch.eye(3).double(), torch.arange(3)
    names = ["0.weight", "2.bias"]
    found = function(model, F.cross_entropy, (x, y), params=iter(names))
    assert torch.equal(found.matrix.A, function(model, F.cross_entropy, (x, y), params=names).matrix.A)
    with pytest.raises(ValueError, match=r"names out of model.named_parameters\(\). Got \['Parameter', 'Parameter'\]"):
        function(model, F.cross_entropy, (x, y), params=model[0].parameters())


# ---------------------------------------------------------------- odd layers


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(2, 3), nn.LSTMCell(2, 3)

    def forward(self, x):
        h = state = None
        for step in x.unbind(1):
            h, state = self.gru(step, h), self.lstm(step, state)
        return h + state[0]


class Counting(nn.Linear):
    """It writes to a buffer of its own."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class TiedPadding(nn.Module):
    """The row of the padding token gets no gradient as an embedding, but gets one as an output weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)).sum(1))


class Doubled(torch.autograd.Function):
    """A function that has a gradient but no forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Backwards(nn.Linear):
    def forward(self, x):
        return Doubled.apply(super().forward(x))


TOKENS = torch.tensor([[0, 1, 2], [3, 0, 0], [1, 1, 3], [2, 3, 0]])
LAYERS = {
    "cells": lambda: (Cells(), torch.randn(4, 2, 2).double()),
    "a buffer it writes to": lambda: (Counting(), torch.randn(4, 3).double()),
    "padding": lambda: (nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Flatten(), nn.Linear(9, 3)), TOKENS),
    "padding, tied": lambda: (TiedPadding(), TOKENS),
    "no forward mode": lambda: (Backwards(3, 3), torch.randn(4, 3).double()),
}


@pytest.mark.parametrize("layer", LAYERS)
@by_name
def test_odd_layers(name, layer):
    torch.manual_seed(0)
    model, x = LAYERS[layer]()
    model, y = model.double(), torch.tensor([0, 2, 1, 2])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    function = partial(hessian, num_probes=1) if name == "hessian" else EXACT[name]  # its exact λ takes long
    by = "tensor" if layer == "cells" else "unit"  # whose many blocks take long
    found = function(model, F.cross_entropy, (x, y), by, chunk_size=3, norm_probes=1)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    M = dense(name, model, F.cross_entropy, x, y) / 4
    blocks = reference.blocks_of(found.partition.labels.tolist())
    lam, B = reference.proposition_1(M, blocks)
    reference.assert_close(found.matrix.A, reference.canonical(lam, B, blocks), 1e-8)
    exact = ~found.report.estimated
    reference.assert_close(found.matrix.lam[exact], lam[exact.numpy()], 1e-8)


# ---------------------------------------------------------------- losses that are not what they are said to be


@each
def test_a_reduction_is_checked_with_dropout_too(function):
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(6) % 3
    with pytest.raises(ValueError, match="Pass reduction='sum'"):
        function(
            classifier(nn.Dropout(0.5)),
            partial(F.cross_entropy, reduction="sum"),
            (x, y),
            generator=torch.Generator().manual_seed(0),
        )


@each
def test_a_reduction_is_checked_with_batches_of_one(function):
    x, y = torch.eye(3).double(), torch.ones(3, 3).double()
    batches = list(zip(x.split(1), y.split(1), strict=True))
    total = partial(F.mse_loss, reduction="sum")
    with pytest.raises(ValueError, match="Pass reduction='sum'"):
        function(classifier(), total, batches)
    function(classifier(), total, batches, reduction="sum")


@pytest.mark.parametrize("function", [empirical_fisher, ggn, hessian])
@pytest.mark.parametrize("batch_size", [60, 15])
def test_class_weights_are_noticed_in_sorted_data(function, batch_size):
    x, y = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(60) // 20
    weighted = partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0, 0.1]).double())
    with pytest.raises(ValueError, match="neither the mean nor the sum"):
        function(classifier(), weighted, zip(x.split(batch_size), y.split(batch_size), strict=True))


def padded(seed, n, dtype=torch.float64):
    """Sequences of different lengths, padded with ignored labels."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (n,), generator=random)
    lengths[0], lengths[-1] = 2, 4
    x, y = sequences(n, 6, seed)
    y[torch.arange(5) >= lengths.unsqueeze(1)] = -100
    return x.to(dtype), y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("head", ["random", "zero"])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_every_padded_data_set_is_refused(dtype, head, chunk_size):
    """A mean over all tokens weighs long sequences more, even where halves balance or all losses are equal."""
    model = tagger().to(dtype)
    if head == "zero":
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
    for seed in range(200):
        function = FUNCTIONS[seed % 4]
        with pytest.raises(ValueError, match="neither the mean nor the sum"):
            function(model, F.cross_entropy, padded(seed, 4 + seed % 21, dtype), chunk_size=chunk_size)


@by_name
def test_padded_data_as_a_sum(name):
    model, (x, y) = tagger(), padded(0, 5)
    total = partial(F.cross_entropy, reduction="sum")
    found = EXACT[name](model, total, (x, y), "unit", reduction="sum")
    assert_block_mean_of(found, dense(name, model, total, x, y))


@each
def test_a_sample_without_any_label_is_refused(function):
    x, y = sequences(4, 5)
    y[2] = -100
    with pytest.raises(ValueError, match="neither the mean nor the sum"):
        function(tagger(), F.cross_entropy, (x, y))


@pytest.mark.parametrize("name", ["empirical_fisher", "ggn", "hessian"])
def test_class_weights_as_a_sum(name):
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(6) % 3
    weighted = partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0, 0.1]).double(), reduction="sum")
    found = EXACT[name](classifier(), weighted, (x, y), reduction="sum")
    assert_block_mean_of(found, dense(name, classifier(), weighted, x, y))


@each
@pytest.mark.parametrize("margin", [2.0, 9.0, 14.0, 20.0, 120.0])
def test_well_fitted_nets_are_not_refused(function, margin):
    """Losses and gradients that are all rounding in float32 are no contradiction."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(margin * torch.eye(3))
    x = torch.eye(3).repeat(5, 1) + 0.01 * torch.randn(15, 3, generator=torch.Generator().manual_seed(0))
    function(model, F.cross_entropy, (x, torch.arange(15) % 3))
    function(model, F.mse_loss, (x, 1.001 * model(x).detach()))


def test_where_labels_are_missing_late_gauss_newton_and_fisher_still_agree():
    """The check sees 16 samples of the batch, and not the one that is padded."""
    model, (x, y) = tagger(), sequences(40, 5)
    y[1, 1:] = -100
    found = ggn(model, F.cross_entropy, (x, y), num_probes=None)
    expected = fisher(model, F.cross_entropy, (x, y))
    reference.assert_close(found.matrix.A, expected.matrix.A, 1e-12)
    reference.assert_close(found.matrix.lam, expected.matrix.lam, 1e-12)


def test_a_model_is_refused_whose_samples_mix_without_a_trace_in_the_loss():
    class Swap(nn.Linear):
        def forward(self, x):
            return super().forward(x).flip(0)

    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double(), torch.zeros(4, 3).double()
    with pytest.raises(ValueError, match="models that mix the samples of a batch"):
        ggn(Swap(3, 3).double(), F.mse_loss, (x, y))


def test_outputs_that_cannot_be_divided_are_checked_by_their_losses():
    class Outputs:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(nn.Linear):
        def forward(self, x):
            return Outputs(super().forward(x))

    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(6) % 3
    model = Wrapped(3, 3).double()
    hessian(model, lambda out, y: F.cross_entropy(out.logits, y), (x, y))
    with pytest.raises(ValueError, match="Pass reduction='sum'"):
        hessian(model, lambda out, y: F.cross_entropy(out.logits, y, reduction="sum"), (x, y))


@each
def test_a_loss_that_is_not_finite_far_into_the_data(function):
    x, y = torch.ones(60, 3).double(), torch.zeros(60, 3).double()
    y[41] = float("nan")
    with pytest.raises(ValueError, match=f"{function.__name__}: the loss is not finite .* in samples 40 to 49"):
        function(classifier(), F.mse_loss, (x, y), chunk_size=10)


def test_the_exact_fisher_refuses_very_many_outputs():
    model, x, y = nn.Conv2d(1, 5, 1), torch.ones(2, 1, 32, 32), torch.ones(2, 32, 32, dtype=torch.long)
    with pytest.raises(ValueError, match=r"at most 4096 outputs per sample \(or labels='sampled'\). Got 5120"):
        fisher(model, F.cross_entropy, (x, y))
    assert fisher(model, F.cross_entropy, (x, y), labels="sampled").matrix.trace() > 0


@pytest.mark.parametrize("function", [fisher, ggn, hessian])
def test_true_is_no_number_of_probes(function):
    with pytest.raises(TypeError, match=r"'num_probes' parameter of .* must be a whole number. Got True"):
        function(classifier(), F.cross_entropy, (torch.eye(3).double(), torch.arange(3)), num_probes=True)


# ---------------------------------------------------------------- what the block mean explains, λ being an estimate


@pytest.mark.parametrize(
    "name", ["sampled labels", *(pytest.param(n, marks=pytest.mark.slow) for n in ("hessian", "ggn"))]
)
def test_the_explained_share_counts_the_error_of_lambda(name):
    torch.manual_seed(1)
    model, (x, y) = small_net(), data(seed=1, n=7, size=4, classes=5)
    estimate, exact = {
        "sampled labels": (partial(fisher, labels="sampled", num_probes=2), fisher),
        "hessian": (partial(hessian, num_probes=4), partial(hessian, num_probes=None)),
        "ggn": (partial(ggn, num_probes=2), partial(ggn, num_probes=None)),
    }[name]
    matrix, block_mean = (exact(model, F.cross_entropy, (x, y), by) for by in ("element", "tensor"))
    truth = float(block_mean.matrix.norm() / matrix.matrix.norm()) ** 2
    reports = [
        estimate(model, F.cross_entropy, (x, y), norm_probes=30, generator=torch.Generator().manual_seed(seed)).report
        for seed in range(30)
    ]
    found = torch.tensor([report.explained for report in reports])
    told = torch.tensor([report.explained_error for report in reports]).square().mean().sqrt()
    assert abs(found.mean() - truth) < 5 * found.std() / 30**0.5
    assert told > found.std() / 1.6  # never much too small; two standard deviations from 30 runs differ by less
