"""The blocks of a group: what "unit" means, groups that change, tensors without entries, large matrices."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from blockmean import AdaGradBMA, AdaGradFull, AdamBMA, NaturalGradientBMA, Partition, diagnose
from blockmean.optim import block_mean
from support.optimizers import Net, assert_same, every_class, params_of, set_gradients, snapshot, train

# -------------------------------------------------------------------- what a unit is


class Conv1D(nn.Module):
    """A layer that stores its weight as (in, out), like Hugging Face's layer of this name."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_the_modules_of_a_model_say_which_dim_is_the_output():
    assert Partition.of(Conv1D(3, 5), by="unit").sizes.tolist() == [5, 5, 5, 1, 1, 1]
    assert Partition.of(nn.Linear(5, 3), by="unit").sizes.tolist() == [5, 5, 5, 1, 1, 1]
    transposed = nn.ConvTranspose2d(4, 6, 2, bias=False)
    assert Partition.of(transposed, by="unit").sizes.tolist() == [16] * 6
    labels = Partition.of(transposed, by="unit").labels.view(4, 6, 2, 2)
    assert (labels == torch.arange(6).view(6, 1, 1)).all()


def test_outputs_of_grouped_transposed_convolutions_belong_to_their_group():
    layer = nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False)  # weight (4, 3, 3): inputs 0 and 1 make outputs 0, 1, 2
    labels = Partition.of(layer, by="unit").labels.view(4, 3, 3)
    assert labels[:, :, 0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    # The gradient of one output reaches only the weights of its block.
    layer(torch.randn(1, 4, 5))[0, 4].sum().backward()
    assert torch.equal(layer.weight.grad != 0, labels == 4)


@pytest.mark.parametrize("make", [AdamBMA, lambda p: AdaGradBMA(p, variant="weighted", partition="unit")])
def test_an_optimizer_of_a_model_steps_alike_however_the_weight_is_stored(make):
    torch.manual_seed(0)
    usual, other = nn.Linear(7, 3), Conv1D(3, 7)
    with torch.no_grad():
        other.weight.copy_(usual.weight.T)
        other.bias.copy_(usual.bias)
    optimizers = make(usual), make(other)
    for t in range(5):
        inputs = torch.rand(8, 7, generator=torch.Generator().manual_seed(t))
        for model, optimizer in zip((usual, other), optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(other.weight.T, usual.weight, rtol=0, atol=1e-5)  # float32, summed in a different order
    by_dim = copy.deepcopy(other)
    assert AdamBMA(by_dim.named_parameters(), partition=lambda name, p: 1 if p.ndim == 2 else "unit").param_groups
    assert optimizers[1].param_groups[0]["param_names"] == ["weight", "bias"]


def test_a_model_may_be_given_in_a_group():
    model, twin = Net(), Net()
    one = AdamBMA([{"params": model.conv, "lr": 0.1}, {"params": model.head}])
    two = AdamBMA([{"params": twin.conv.named_parameters(), "lr": 0.1}, {"params": twin.head.named_parameters()}])
    train(model, one, 3)
    train(twin, two, 3)
    assert_same(snapshot(one), snapshot(two))


@pytest.mark.parametrize("dims", [5, (0, 0), (0, "a"), -4])
def test_dims_that_a_tensor_does_not_have_are_refused(dims):
    with pytest.raises(ValueError, match=r"The dims that 'by' returns for w \[2, 3, 4\] must be different ones from 0"):
        Partition.of({"w": torch.zeros(2, 3, 4)}, by=lambda name, tensor: dims)


def test_dims_may_be_counted_from_the_end():
    by_last = Partition.of({"w": torch.zeros(2, 3)}, by=lambda name, tensor: -1)
    assert by_last == Partition.of({"w": torch.zeros(2, 3)}, by=lambda name, tensor: (1,))
    assert by_last.sizes.tolist() == [2, 2, 2] and by_last.names == ("w[0]", "w[1]", "w[2]")


@pytest.mark.parametrize("coupling", ["all", "module", "none"])
def test_norm_gains_and_biases_take_the_plain_step(coupling):
    """Equal to AdamW up to rounding, although their gradients are fully coherent; weights are corrected."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4))
    theirs = copy.deepcopy(ours)
    optimizer = AdamBMA(ours.named_parameters(), lr=0.01, coupling=coupling)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for t in range(4):
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            param.grad = torch.rand(param.shape, generator=torch.Generator().manual_seed(t))
            other.grad = param.grad.clone()
        optimizer.step()
        reference.step()
    for (name, param), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if param.ndim == 1:
            torch.testing.assert_close(param, other, rtol=0, atol=5e-7)  # AdamW decays before it steps: rounding
            assert "U" not in optimizer.state[param], name
        else:
            assert (param - other).abs().max() > 1e-3
    assert set(optimizer.block_statistics()[0].parameters) == {"1.weight"}


def test_a_step_in_which_nothing_that_is_corrected_has_a_gradient():
    layer = nn.Linear(3, 2)
    optimizer = AdamBMA(layer.named_parameters())
    layer.bias.grad = torch.ones(2)
    before = layer.weight.detach().clone()
    optimizer.step()
    assert torch.equal(layer.weight, before) and optimizer.block_statistics() == []


# -------------------------------------------------------------------- groups that change


def test_a_parameter_of_another_size_in_the_same_place_is_refused():
    a, b = (nn.Parameter(torch.zeros(shape)) for shape in [(3, 4), (10, 10)])
    optimizer = AdaGradBMA([a, b])
    optimizer.param_groups[0]["params"][1] = b = nn.Parameter(torch.zeros(2, 2))
    set_gradients([a, b], 1)
    message = r"had the shapes \[\(3, 4\), \(10, 10\)\] when added, and have \[\(3, 4\), \(2, 2\)\] now. Add new"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert not optimizer.state


def test_the_others_keep_their_statistics_when_a_parameter_is_replaced():
    def run(replace):
        params = [nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)) for _ in range(3)]
        optimizer = AdaGradBMA(params, lr=0.1, variant="consistent", partition="unit")
        for t in range(3):
            set_gradients(params, t)
            optimizer.step()
        if replace:
            params[0] = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        set_gradients(params[1:], 9)
        params[0].grad = None
        optimizer.step()
        return [param.detach() for param in params[1:]]

    for replaced, kept in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(replaced, kept, rtol=0, atol=1e-12)


@every_class
def test_a_replaced_parameter_is_not_held_alive(case):
    model = Net()
    optimizer = case(model.parameters())
    old = weakref.ref(model.scale)
    optimizer.param_groups[0]["params"][0] = model.scale = nn.Parameter(torch.tensor(1.0))
    train(model, optimizer, 2)
    gc.collect()
    assert old() is None


def test_a_callable_partition_is_not_part_of_what_is_saved():
    captured = torch.nn.Identity().register_forward_hook  # cannot be pickled
    optimizer = AdamBMA(Net().named_parameters(), partition=lambda name, p: "unit" if captured else "tensor")
    copied = pickle.loads(pickle.dumps(optimizer))
    assert optimizer.defaults["partition"] == copied.param_groups[0]["partition"] == "custom"
    optimizer.add_param_group({"params": [("w", nn.Parameter(torch.zeros(2, 3)))]})
    assert optimizer._layouts[1].num_blocks == 2
    with pytest.raises(ValueError, match=r"has no callable to cut these parameters with.* Pass 'partition'"):
        copied.add_param_group({"params": [("w", nn.Parameter(torch.zeros(2, 3)))]})
    copied.add_param_group({"params": [("w", nn.Parameter(torch.zeros(2, 3)))], "partition": "unit"})


def test_tensors_in_the_place_of_parameters_are_cut_as_the_callable_said():
    def stripes(name, tensor):
        return torch.arange(tensor.numel()).remainder(2).view(tensor.shape) if tensor.numel() > 1 else "tensor"

    model, reference = Net(), Net()
    optimizer = AdamBMA(Net(seed=5).named_parameters(), partition=stripes)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 3)
    train(reference, AdamBMA(reference.named_parameters(), partition=stripes), 3)
    assert_same(params_of(model), params_of(reference))
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"had the shapes .* Construct the optimizer anew"):
        optimizer.step()


# -------------------------------------------------------------------- tensors without entries


@every_class
@pytest.mark.parametrize("first", [True, False])
def test_steps_in_which_only_an_empty_tensor_has_a_gradient(case, first):
    empty, full = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2, 3))
    optimizer = case([empty, full] if first else [full, empty])
    for step in range(3):
        empty.grad = torch.zeros(0, 3)
        full.grad = torch.ones(2, 3) if step == 1 else None
        before = full.detach().clone()
        optimizer.step()
        assert torch.equal(full, before) == (step != 1)
    assert float(optimizer.state[empty]["step"]) == 3 and getattr(optimizer, "diagonal_fallbacks", 0) == 0


def test_a_shared_block_does_not_fade_where_only_an_empty_member_has_a_gradient():
    empty, a, b = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = AdamBMA([empty, a, b], partition="all")
    for param in (empty, a, b):
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[a].items()}
    a.grad = b.grad = None
    optimizer.step()
    assert_same(dict(optimizer.state[a]), before)


# -------------------------------------------------------------------- sizes


def test_a_matrix_that_takes_seconds_to_decompose_is_announced(monkeypatch):
    monkeypatch.setattr(block_mean, "SLOW_MATRIX", 4)
    params = [nn.Parameter(torch.zeros(8, 3))]
    with pytest.warns(UserWarning, match=r"decomposes a matrix between 8 blocks: about 8 seconds.* coupling='none'"):
        AdaGradBMA(params, partition="unit")
    AdaGradBMA(params, partition="unit", coupling="none")
    AdaGradBMA(params, partition="unit", refresh_every=10)
    AdaGradBMA(params, partition="unit", correction=False)


def test_the_refusal_of_the_full_matrix_names_options_that_it_has():
    with pytest.raises(ValueError, match="Raise max_bytes, split the parameters into groups, or take AdaGradBMA"):
        AdaGradFull([nn.Parameter(torch.zeros(20000))])


# -------------------------------------------------------------------- what users of torch.optim type


def test_arguments_of_adamw_go_where_adamw_has_them():
    model = Net()
    optimizer = AdamBMA(model.parameters(), 0.01, (0.8, 0.9), 1e-6, 0.1, False, maximize=True, foreach=True, fused=None)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"], group["foreach"]) == ((0.8, 0.9), 1e-6, 0.1, True)
    assert AdamBMA(model.parameters()).param_groups[0]["weight_decay"] == 0.01
    with pytest.raises(ValueError, match="The 'amsgrad' parameter of AdamBMA must be False"):
        AdamBMA(model.parameters(), amsgrad=True)
    with pytest.raises(RuntimeError, match=r"NaturalGradientBMA has no native kernels.* Take fused=None"):
        NaturalGradientBMA(model.parameters(), fused=True)
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        AdamBMA(model.parameters(), fused=True, foreach=True)
    with pytest.raises(
        TypeError, match=r"The 'foreach' parameter of AdamBMA must be True, False or None. Got 1 instead"
    ):
        AdamBMA(model.parameters(), foreach=1)


class Wrapper:
    """Wraps an optimizer as accelerate and Trainer do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_wrapped_optimizers_are_diagnosed():
    model = Net()
    optimizer = AdamBMA(model.named_parameters())
    train(model, optimizer, 3)
    assert diagnose(Wrapper(Wrapper(optimizer))).share == diagnose(optimizer).share
    with pytest.raises(TypeError, match=r"must be Anova, AdamBMA or AdaGradBMA. Got 'Wrapper'"):
        diagnose(Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)))


def test_a_block_that_moves_with_others_does_not_claim_to_keep_thousands_of_percent():
    first, second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    optimizer = AdaGradBMA([("a", first), ("b", second)], variant="consistent")
    rng = torch.Generator().manual_seed(0)
    for step in range(5):
        first.grad = torch.rand(4, generator=rng) + 1
        second.grad = torch.tensor([1.0, -1.0, 1.0, -1.0 + (1e-3 if step == 4 else 0.5)])
        optimizer.step()
    shown = [line.split()[-1] for line in optimizer.block_statistics()[0].describe().splitlines()[1:3]]
    assert all(kept == "-" or 0 <= int(kept.rstrip("%")) <= 1000 for kept in shown)


@pytest.mark.parametrize("cls", [AdaGradBMA, AdamBMA, NaturalGradientBMA, AdaGradFull])
def test_flattened_parameters_are_refused_by_name(cls):
    param = nn.Parameter(torch.zeros(8))
    param._fsdp_flattened = True
    with pytest.raises(ValueError, match=f"^{cls.__name__} cannot see .* FullyShardedDataParallel .* Use fully_shard"):
        cls([param])


def test_a_model_that_moves_between_steps_takes_the_sums_along():
    """`Module.to` keeps its parameters and replaces their memory: the layout is made anew for the device."""
    model = Net()
    optimizer = AdamBMA(model.named_parameters())
    train(model, optimizer, 2)
    known = optimizer._layouts[0]
    known.placed = torch.device("meta")  # as if they had been elsewhere
    train(model, optimizer, range(2, 4))
    twin = Net()
    train(twin, AdamBMA(twin.named_parameters()), 4)
    assert optimizer._layouts[0] is not known and optimizer._layouts[0].device == torch.device("cpu")
    assert_same(params_of(model), params_of(twin))
