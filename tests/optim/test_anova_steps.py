"""Anova where gradients are sparse, sudden or missing, and where users change its state or options by hand."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from blockmean import Anova
from blockmean.optim.refresh import adam_bound
from support.optimizers import bases


def steps_of(optimizer, param, grads):
    """The root mean square of every step."""
    lengths = []
    for grad in grads:
        before = param.detach().clone()
        param.grad = grad.clone()
        optimizer.step()
        lengths.append(float((param.detach() - before).norm()) / param.numel() ** 0.5)
    return lengths


def noise(shape, count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for _ in range(count)]


def train(model, optimizer, steps, seed):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=rng)
        optimizer.step()


# ---------------------------------------------------------------- length of a step


def few_tokens(shape, tokens, count):
    """Gradients of an embedding, with few of its rows in every batch."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(count):
        rows = torch.randint(shape[0], (tokens,), generator=rng)
        yield torch.zeros(shape).index_add_(0, rows, torch.randn(tokens, shape[1], generator=rng))


def seldom(shape, share, count):
    """Gradients of an expert that most batches do not visit."""
    rng = torch.Generator().manual_seed(0)
    for grad in noise(shape, count):
        yield grad * float(torch.rand((), generator=rng) < share)


def one_outlier(shape, count):
    """An ordinary course, one batch of rank one a hundred times as large, and the ordinary course again."""
    grads = noise(shape, count)
    grads[29] = 100 * torch.outer(*(torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in shape))
    return grads


LONG = {
    "few tokens, auto": (lambda: few_tokens((200, 32), 5, 60), (200, 32), "auto"),
    "few tokens, 4 means": (lambda: few_tokens((60, 20), 2, 60), (60, 20), 4),
    "seldom, auto": (lambda: seldom((32, 48), 0.1, 60), (32, 48), "auto"),
    "one outlier, 1 mean": (lambda: one_outlier((32, 48), 60), (32, 48), 1),
}


@pytest.mark.parametrize("kind", LONG)
def test_no_step_is_much_longer_than_the_learning_rate(kind):
    grads, shape, means = LONG[kind]
    param = nn.Parameter(torch.zeros(shape))
    lengths = steps_of(Anova([param], lr=1.0, weight_decay=0.0, means=means), param, grads())
    assert max(lengths) < 3  # each of four parts is an Adam, and an Adam in a fixed basis stays near 1


def test_an_embedding_trained_with_small_batches_stays_small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    target = torch.randint(10, (1000,))
    optimizer = Anova(model.parameters())
    for _ in range(200):
        words = torch.randint(1000, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), target[words]).backward()
        optimizer.step()
    assert float(model[0].weight.detach().abs().max()) < 5


# ---------------------------------------------------------------- rows without any gradient


def unseen_rows_move(grads, shape):
    param = nn.Parameter(torch.ones(shape))
    seen = torch.arange(shape[0]) % 3 > 0
    optimizer = Anova([param], lr=0.01, weight_decay=0.0)
    for grad in grads:
        param.grad = grad * seen[:, None]
        optimizer.step()
    return bool((param.detach()[~seen] != 1).any())


def test_rows_without_gradient_do_not_move_after_a_first_gradient_of_zero():
    """Layers before one that starts at zero (LoRA, residual branches), and states that DCP initialises."""
    assert not unseen_rows_move([torch.zeros(60, 20), *noise((60, 20), 5)], (60, 20))


def test_words_that_never_occur_do_not_move():
    assert not unseen_rows_move(few_tokens((200, 32), 5, 5), (200, 32))


# ---------------------------------------------------------------- state


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("flat", [True, False])
def test_a_distributed_checkpoint_keeps_when_the_means_started(flat, tmp_path):
    """Loading begins with a step of zero gradients at lr = 0, by which torch creates the state to load into."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = nn.Sequential(nn.Linear(10, 12))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, adamw, 5, seed=0)
    optimizer = Anova(model.parameters(), lr=0.01, means=4)
    optimizer.load_state_dict(adamw.state_dict())
    train(model, optimizer, 2, seed=1)
    assert int(optimizer.state[model[0].weight]["means_start_step"]) == 5
    other = copy.deepcopy(model)
    resumed = Anova(other.parameters(), lr=0.01, means=4)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=tmp_path, no_dist=True)
    saved = get_optimizer_state_dict(other, resumed, options=options)
    dcp.load(saved, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, resumed, saved, options=options)
    train(model, optimizer, 4, seed=2)
    train(other, resumed, 4, seed=2)
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_first_step_without_gradients_leaves_the_means_to_the_next():
    """As torch.distributed creates state: zero gradients at lr = 0. Nothing can be learned from them."""
    param, fresh = (nn.Parameter(torch.ones(12, 10)) for _ in range(2))
    grads = noise((12, 10), 6)
    options = {"lr": 0.01, "weight_decay": 0.0, "betas": (0.0, 0.9)}  # without momentum, whose step count moves on
    optimizer, reference = Anova([param], **options), Anova([fresh], **options)
    steps_of(optimizer, param, [torch.zeros(12, 10)])
    assert not any(W.any() for W in bases(optimizer.state[param]))
    steps_of(optimizer, param, grads[:1])
    steps_of(reference, fresh, grads[:1])
    torch.testing.assert_close(bases(optimizer.state[param]), bases(reference.state[fresh]))


def test_state_replaced_through_data_is_noticed():
    """The usual loop that moves state to another device: `value.data = value.data.to(device)`."""
    param = nn.Parameter(torch.zeros(8, 10))
    optimizer = Anova([param], means=2, weight_decay=0.0)
    steps_of(optimizer, param, noise((8, 10), 4))
    for name, value in optimizer.state[param].items():
        if name not in ("step", "means_start_step"):
            value.data = torch.zeros_like(value.data)
    assert steps_of(optimizer, param, [torch.zeros(8, 10)]) == [0.0]


def test_moments_of_another_shape_are_not_taken_over():
    param = nn.Parameter(torch.zeros(8, 10))
    optimizer = Anova([param], means=2, weight_decay=0.0)
    steps_of(optimizer, param, noise((8, 10), 4))
    param.data = torch.zeros(10, 8)
    with pytest.raises(ValueError, match="Construct the optimizer anew"):
        steps_of(optimizer, param, [torch.zeros(10, 8)])


@pytest.mark.parametrize("means", ["many", -1, 2.5, True])
def test_a_bad_number_of_means_set_by_hand_is_refused_before_anything_changes(means):
    param = nn.Parameter(torch.zeros(8, 10))
    optimizer = Anova([param], means=2)
    steps_of(optimizer, param, noise((8, 10), 1))
    optimizer.param_groups[0]["means"] = means
    with pytest.raises(ValueError, match="The 'means' parameter of Anova must be"):
        optimizer.step()
    assert int(optimizer.state[param]["step"]) == 1


def test_resuming_with_a_frozen_layer_is_bit_exact():
    """Batches of another size take other kernels. Without the frozen layer, resuming is exact."""
    model = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))
    optimizer = Anova(model.parameters(), lr=0.01)
    train(model, optimizer, 3, seed=0)
    model[1].weight.requires_grad_(False)

    def go_on(model, optimizer):
        for grads in zip(*(noise((12, 12), 6, seed) for seed in range(3)), strict=True):
            for layer, grad in zip(model, grads, strict=True):
                layer.weight.grad = grad if layer.weight.requires_grad else None
            optimizer.step()

    other = copy.deepcopy(model)
    resumed = Anova(other.parameters(), lr=0.01)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    go_on(model, optimizer)
    go_on(other, resumed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# ---------------------------------------------------------------- numbers


def test_bfloat16_is_rounded_once_beside_float32_of_the_same_shape():
    grads = [grad.bfloat16() for grad in noise((10, 12), 8)]
    alone, half = (nn.Parameter(torch.ones(10, 12, dtype=torch.bfloat16)) for _ in range(2))
    full = nn.Parameter(torch.ones(10, 12))
    steps_of(Anova([alone], lr=0.01), alone, grads)
    optimizer = Anova([full, half], lr=0.01)
    for grad in grads:
        full.grad, half.grad = grad.float(), grad.clone()
        optimizer.step()
    assert torch.equal(half, alone)


def test_weights_are_orthonormal_in_float64_for_gradients_of_very_different_size():
    rng = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(24, 30, dtype=torch.float64))
    optimizer = Anova([param], means=24)
    worst = 0.0
    for _ in range(300):
        a, b = (torch.randn(n, generator=rng, dtype=torch.float64) for n in (24, 30))
        param.grad = torch.outer(a, b) * 10 ** float(3 * torch.randn((), generator=rng))
        optimizer.step()
        U, _ = bases(optimizer.state[param])
        worst = max(worst, float((U.T @ U - torch.eye(24, dtype=U.dtype)).abs().max()))
    assert worst < 1e-8


def test_a_clamped_adam_is_no_other_adam():
    """Cauchy and Schwarz: the bound of K', R', L' and E' never acts in a fixed basis."""
    beta1, beta, steps = 0.9, 0.95, 200
    rng = torch.Generator().manual_seed(0)
    g = torch.randn(steps, 1000, generator=rng, dtype=torch.float64).exp_().mul_(torch.randn(1000, generator=rng))
    m, v = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for t in range(1, steps + 1):
        m, v = beta1 * m + (1 - beta1) * g[t - 1], beta * v + (1 - beta) * g[t - 1] ** 2
        assert (
            float((m / (1 - beta1**t) / (v / (1 - beta**t)).sqrt()).abs().max()) <= adam_bound(beta1, beta, t) + 1e-12
        )
    assert adam_bound(beta1, beta, 1) == pytest.approx(1) and 1 < adam_bound(beta1, beta, steps) < 1.2
    assert 1.8 < adam_bound(0.98, 0.95, 10_000) < 1.9  # β₁² > mean_beta: cut where the momentum forgets
    assert adam_bound(0.98, 0.95, 10_000) == adam_bound(0.98, 0.95, 150) > adam_bound(0.98, 0.95, 149)
    assert adam_bound(0.5, 0.25, 3) == pytest.approx(adam_bound(0.5, 0.25 + 1e-9, 3))


# ---------------------------------------------------------------- checkpoints of others


def test_adamw_refuses_a_checkpoint_of_anova():
    """`exp_avg` means the same in both; there is no `exp_avg_sq` that AdamW could take for its own."""
    param = nn.Parameter(torch.zeros(12, 10))
    optimizer = Anova([param])
    steps_of(optimizer, param, noise((12, 10), 2))
    adamw = torch.optim.AdamW([param])
    adamw.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg_sq"):
        adamw.step()


def test_checkpoints_of_the_first_form_are_refused_in_words():
    param = nn.Parameter(torch.zeros(12, 10))
    optimizer = Anova([param])
    steps_of(optimizer, param, noise((12, 10), 2))
    saved = optimizer.state_dict()
    zeros = {name: torch.zeros(12, 10) for name in ("exp_avg", "exp_avg_sq", "units", "inputs")}
    saved["state"][0] = {"step": torch.tensor(2.0), "began": torch.tensor(0.0), **zeros}
    with pytest.raises(ValueError, match=r"first form, .* learning rates meant something else there"):
        Anova([param]).load_state_dict(saved)


@pytest.mark.parametrize("name", ["unit_means", "input_means", "grand_means"])
def test_means_of_another_shape_or_without_a_part_are_not_loaded(name):
    param = nn.Parameter(torch.randn(64, 48))
    optimizer = Anova([param], means=4)
    steps_of(optimizer, param, noise((64, 48), 2))
    short, without, rows = (copy.deepcopy(optimizer.state_dict()) for _ in range(3))
    short["state"][0][name] = short["state"][0][name][..., :-1]
    del without["state"][0][name]
    rows["state"][0]["unit_means"] = rows["state"][0]["unit_means"][:10]
    for saved, message in ((short, "means|shape"), (without, "lacks"), (rows, "another shape")):
        with pytest.raises(ValueError, match=message):
            Anova([param], means=4).load_state_dict(saved)


@pytest.mark.parametrize("means", [(0, 3), (3, 0)])
def test_means_of_one_side_follow_the_gradients(means):
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(30, 3, generator=rng), torch.randn(40, 3, generator=rng)
    param = nn.Parameter(torch.zeros(30, 40))
    optimizer = Anova([param], means=means)
    steps_of(optimizer, param, noise((30, 40), 1))  # what they start with is noise
    for _ in range(60):
        scales, rest = torch.randn(3, generator=rng), 0.1 * torch.randn(30, 40, generator=rng)
        steps_of(optimizer, param, [(a * scales) @ b.T + rest])
    (found,) = optimizer.block_statistics()
    assert found.shares.means > 0.8


def test_the_options_of_an_adamw_configuration_are_accepted_where_they_are_false():
    param = nn.Parameter(torch.zeros(12, 10))
    Anova([param], amsgrad=False, capturable=False, differentiable=False)
    Anova([{"params": [param], "fused": True, "foreach": False}])  # as torchtitan's container sets them
    for name in ("amsgrad", "differentiable"):
        with pytest.raises(ValueError, match=f"The '{name}' parameter of Anova must be False"):
            Anova([param], **{name: True})


@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=["kernels", "torch"])
@pytest.mark.parametrize("after", [0.0, 1e-3])
def test_rounding_errors_take_no_full_steps_when_gradients_shrink(options, after):
    """M keeps the errors of larger gradients, which have one direction here; means that see only errors stay small."""
    generator = torch.Generator().manual_seed(0)
    G = torch.outer(torch.randn(64, generator=generator), torch.randn(96, generator=generator))
    param = nn.Parameter(torch.zeros(64, 96))
    optimizer = Anova([param], lr=1e-3, weight_decay=0.0, **options)
    for t in range(40):
        param.grad = G * (1 + t % 3) * (1.0 if t < 30 else after)
        before = param.detach().clone()
        optimizer.step()
        if t >= 30:  # other directions move by up to 3 rates, all entries together, as before; without memory it is 86
            assert torch.linalg.svdvals((param.detach() - before).double())[1] < 5e-3


def test_state_in_channels_last_is_put_in_order_when_it_is_loaded():
    param = nn.Parameter(torch.zeros(16, 8, 3, 3))
    optimizer = Anova([param], lr=1e-3)
    for grad in noise((16, 8, 3, 3), 6):
        param.grad = grad
        optimizer.step()
    turned = copy.deepcopy(optimizer.state_dict())
    turned["state"][0] = {
        name: value.to(memory_format=torch.channels_last) if value.ndim == 4 else value
        for name, value in turned["state"][0].items()
    }
    other = nn.Parameter(param.detach().clone())
    loaded = Anova([other], lr=1e-3)
    loaded.load_state_dict(turned)
    for grad in noise((16, 8, 3, 3), 4):
        param.grad, other.grad = grad, grad.clone()
        optimizer.step()
        loaded.step()
    assert torch.equal(param, other)
