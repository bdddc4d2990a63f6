"""What curvature refuses and how it says so, and that it leaves everything as it was."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from blockmean import Partition
from blockmean.curvature import empirical_fisher, fisher, ggn, hessian

FUNCTIONS = [empirical_fisher, fisher, ggn, hessian]
each = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def net(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *extra, nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.fixture
def xy():
    random = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, generator=random).double(), torch.randint(3, (6,), generator=random)


# ---------------------------------------------------------------- nothing is changed


def left_as_it_was(model, call):
    """Run a call and compare everything it could have touched."""
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = None
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    call()
    assert torch.equal(rng, torch.get_rng_state())
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True, True, True][: len(grads)]
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    for name, p in model.named_parameters():
        assert (p.grad is None) == (grads[name] is None)
        assert p.grad is None or torch.equal(p.grad, grads[name])
        assert p.grad_fn is None


@each
@pytest.mark.parametrize("training", [True, False])
def test_everything_is_left_as_it_was(function, training, xy):
    model = net().train(training)
    left_as_it_was(model, lambda: function(model, F.cross_entropy, xy, norm_probes=1))


@each
def test_everything_is_left_as_it_was_with_dropout(function, xy):
    model = net(nn.Dropout(0.5))
    left_as_it_was(model, lambda: function(model, F.cross_entropy, xy, generator=torch.Generator().manual_seed(0)))


@each
def test_everything_is_left_as_it_was_after_an_error(function, xy):
    model = net(nn.Dropout(0.5))

    def call():
        with pytest.raises(ValueError, match="draws random numbers"):
            function(model, F.cross_entropy, xy)

    left_as_it_was(model, call)


@each
def test_it_works_inside_no_grad_and_with_inputs_that_require_gradients(function, xy):
    model, (x, y) = net(), xy
    expected = function(model, F.cross_entropy, xy)
    with torch.no_grad():
        assert torch.equal(function(model, F.cross_entropy, xy).matrix.A, expected.matrix.A)
    found = function(model, F.cross_entropy, (x.clone().requires_grad_(), y))
    assert torch.equal(found.matrix.A, expected.matrix.A)
    assert not found.matrix.A.requires_grad


# ---------------------------------------------------------------- models


@each
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False).eval()])
def test_normalisation_over_the_batch_is_refused(function, norm, xy):
    model = net(copy.deepcopy(norm))
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\) normalises over the batch.*model.eval\(\)"):
        function(model, F.cross_entropy, xy)


@each
def test_dropout_in_training_mode_needs_a_generator(function, xy):
    model = net(nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"draws random numbers \(dropout in training mode\?\)"):
        function(model, F.cross_entropy, xy)
    function(model.eval(), F.cross_entropy, xy)
    model.train()
    seeds = [torch.Generator().manual_seed(seed) for seed in (0, 0, 1)]
    first, again, other = (function(model, F.cross_entropy, xy, generator=g) for g in seeds)
    assert torch.equal(first.matrix.A, again.matrix.A)
    assert not torch.equal(first.matrix.A, other.matrix.A)


@each
def test_dropout_as_a_function_is_noticed_too(function, xy):
    class Noisy(nn.Linear):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5)

    with pytest.raises(ValueError, match="draws random numbers"):
        function(Noisy(3, 3).double(), F.cross_entropy, xy)


@each
def test_a_model_that_mixes_samples_is_refused(function, xy):
    class Centre(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    with pytest.raises(ValueError, match="neither the mean nor the sum of the losses of single samples"):
        function(net(Centre()), F.cross_entropy, xy)


@each
def test_models_and_losses_must_be_models_and_losses(function, xy):
    with pytest.raises(TypeError, match=f"'model' parameter of {function.__name__} must be a torch.nn.Module"):
        function(lambda x: x, F.cross_entropy, xy)
    if function is not fisher:  # which asks for the likelihood first
        with pytest.raises(TypeError, match=r"'loss_fn' parameter of .* must be callable"):
            function(net(), 3, xy)


@pytest.mark.parametrize("function", [fisher, ggn])
def test_outputs_must_be_a_tensor(function, xy):
    class Pair(nn.Linear):
        def forward(self, x):
            return (super().forward(x),)

    loss = nn.CrossEntropyLoss()
    loss.forward = lambda out, y: F.cross_entropy(out[0], y)
    with pytest.raises(TypeError, match=f"{function.__name__}: the model must return a tensor"):
        function(Pair(3, 3).double(), loss, xy)


def test_ggn_refuses_very_many_outputs():
    model = nn.Linear(1, 5000)
    with pytest.raises(ValueError, match=r"at most 4096 outputs per sample. Got 5000"):
        ggn(model, F.mse_loss, (torch.ones(2, 1), torch.ones(2, 5000)))


# ---------------------------------------------------------------- losses


@each
def test_a_reduction_that_contradicts_the_loss(function, xy):
    total = partial(F.cross_entropy, reduction="sum")
    with pytest.raises(ValueError, match=r"Got 'mean', but the loss is a sum: it is .* Pass reduction='sum'"):
        function(net(), total, xy)
    with pytest.raises(ValueError, match=r"Got 'sum', but the loss is a mean: it is .* Pass reduction='mean'"):
        function(net(), F.cross_entropy, xy, reduction="sum", chunk_size=1)
    with pytest.raises(ValueError, match=r"'reduction' parameter of .* must be 'mean' or 'sum'. Got 'none'"):
        function(net(), F.cross_entropy, xy, reduction="none")


@each
def test_a_reduction_is_checked_on_the_first_batch_that_can_tell(function, xy):
    x, y = xy
    total = partial(F.cross_entropy, reduction="sum")
    with pytest.raises(ValueError, match="Pass reduction='sum'"):
        function(net(), total, [(x[:1], y[:1]), (x[1:], y[1:])])


@each
def test_class_weights_are_no_mean_over_samples(function, xy):
    weighted = partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0, 0.1]).double())
    expected = "class weights is no log-likelihood" if function is fisher else "neither the mean nor the sum"
    with pytest.raises(ValueError, match=expected):
        function(net(), weighted, xy)
    with pytest.raises(ValueError, match=expected):
        function(net(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]).double()), xy)


@each
def test_a_loss_that_is_no_number(function, xy):
    with pytest.raises(ValueError, match=r"returns a scalar tensor .* Got 'shape \(6,\)' instead"):
        function(net(), partial(F.cross_entropy, reduction="none"), xy)


@each
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_losses_that_are_not_finite(function, bad, xy):
    x, y = xy
    with pytest.raises(ValueError, match=r"the loss is not finite .* in samples 0 to 5"):
        function(net(), F.cross_entropy, (x * bad, y))
    later = x.clone()
    later[5] = bad
    with pytest.raises(ValueError, match=f"{function.__name__}: .* is not finite .* samples [45] to 5"):
        function(net(), F.cross_entropy, (later, y), chunk_size=2)


def test_gradients_that_are_not_finite():
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(0.0)
    x = torch.ones(4, 1).double()
    with pytest.raises(ValueError, match="empirical_fisher: the gradient is not finite"):
        empirical_fisher(model, lambda out, _: out.abs().sqrt().mean(), (x, x))


def test_fisher_needs_a_likelihood_it_knows(xy):
    with pytest.raises(ValueError, match=r"likelihood behind the loss. Got <function l1_loss.*cross_entropy and mse_l"):
        fisher(net(), F.l1_loss, xy)
    with pytest.raises(ValueError, match=r"label_smoothing=0.1 is no log-likelihood"):
        fisher(net(), nn.CrossEntropyLoss(label_smoothing=0.1), xy)
    with pytest.raises(ValueError, match=r"'labels' parameter of fisher must be 'exact' or 'sampled'. Got 'true'"):
        fisher(net(), F.cross_entropy, xy, labels="true")


# ---------------------------------------------------------------- data


@each
@pytest.mark.parametrize("empty", [[], iter(()), (torch.ones(0, 3), torch.ones(0))])
def test_empty_data(function, empty):
    with pytest.raises(ValueError, match=f"'data' parameter of {function.__name__} must be at least one sample"):
        function(net(), F.cross_entropy, empty)


@each
def test_data_of_another_kind(function, xy):
    x, y = xy
    with pytest.raises(TypeError, match=r"'data' parameter of .* must be a pair of tensors or an iterable of"):
        function(net(), F.cross_entropy, x)
    with pytest.raises(TypeError, match="Got 'a batch of type Tensor' instead"):
        function(net(), F.cross_entropy, [x, y, x])
    with pytest.raises(TypeError, match="tensors with the samples along dim 0"):
        function(net(), F.cross_entropy, [(x, 3)])
    with pytest.raises(ValueError, match=r"as long in inputs as in targets. Got 'lengths \[5, 6\]'"):
        function(net(), F.cross_entropy, (x, y[:5]))


# ---------------------------------------------------------------- parameters, partitions and numbers


@each
def test_a_partition_that_does_not_match(function, xy):
    with pytest.raises(ValueError, match=r"one entry for each of the 31 entries of the 4 chosen parameters \(0.weight"):
        function(net(), F.cross_entropy, xy, Partition.from_sizes([30]))
    with pytest.raises(ValueError, match=r"'by' parameter of Partition.of must be a callable or one of"):
        function(net(), F.cross_entropy, xy, "layer")


@each
def test_parameters_that_are_not_there(function, xy):
    with pytest.raises(ValueError, match=r"names out of model.named_parameters\(\). Got \['weight'\]"):
        function(net(), F.cross_entropy, xy, params=["0.weight", "weight"])
    with pytest.raises(ValueError, match=r"'params' parameter of .* must be at least one name"):
        function(net(), F.cross_entropy, xy, params=[])
    with pytest.raises(ValueError, match="true for at least one parameter"):
        function(net(), F.cross_entropy, xy, params=lambda name, p: False)
    with pytest.raises(TypeError, match=r"a collection of names or a predicate. Got '0.weight'"):
        function(net(), F.cross_entropy, xy, params="0.weight")
    with pytest.raises(ValueError, match="one with parameters that require gradients"):
        function(net().requires_grad_(False), F.cross_entropy, xy)


def test_complex_parameters_are_refused():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"real and dense. Got .'weight': torch.complex64"):
        hessian(model, lambda out, y: out.abs().mean(), (torch.ones(2, 2), torch.ones(2)))


@each
def test_numbers_out_of_range(function, xy):
    with pytest.raises(ValueError, match=r"'chunk_size' parameter of .* must be at least 1. Got 0"):
        function(net(), F.cross_entropy, xy, chunk_size=0)
    with pytest.raises(TypeError, match=r"'chunk_size' parameter of .* must be a whole number. Got 2.5"):
        function(net(), F.cross_entropy, xy, chunk_size=2.5)
    with pytest.raises(ValueError, match=r"'norm_probes' parameter of .* must be at least 0. Got -1"):
        function(net(), F.cross_entropy, xy, norm_probes=-1)
    if function is not empirical_fisher:
        with pytest.raises(ValueError, match=r"'num_probes' parameter of .* must be at least 1"):
            function(net(), F.cross_entropy, xy, num_probes=0)
