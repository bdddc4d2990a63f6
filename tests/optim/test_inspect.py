"""What an optimizer reports about itself: `block_statistics` and `diagnose`."""

import pytest
import torch
from torch import nn

from blockmean import AdaGradBMA, AdaGradFull, AdamBMA, Anova, NaturalGradientBMA, diagnose
from support.problems import data, gradient, small_net

MAKERS = {
    "paper": lambda p, coupling: AdaGradBMA(p, coupling=coupling),
    "weighted": lambda p, coupling: AdaGradBMA(p, variant="weighted", partition="unit", coupling=coupling),
    "adam": lambda p, coupling: AdamBMA(p, coupling=coupling),
    "natural": lambda p, coupling: NaturalGradientBMA(p, partition="unit", coupling=coupling),
}


def trained(make, steps=5, seed=0):
    torch.manual_seed(seed)
    model = small_net()
    optimizer = make(model.named_parameters())
    inputs, targets = data(seed, 16, 4, 5)
    for _ in range(steps):
        gradient(model, inputs, targets)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("coupling", ["all", "module", "none"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_optimizer_tells_its_blocks_and_their_matrix(make, coupling):
    model, optimizer = trained(lambda p: make(p, coupling))
    found = optimizer.block_statistics()
    expected = ["0", "2", "5"] if coupling == "module" else [coupling]
    assert [statistics.coupling for statistics in found] == expected
    # Under "unit", biases have no blocks of their own; a natural gradient needs all entries.
    plain = isinstance(optimizer, AdamBMA) or optimizer.defaults.get("variant") == "weighted"
    entries = sum(p.numel() for p in model.parameters() if p.ndim > 1 or not plain)
    assert sum(int(s.sizes.sum()) for s in found) == entries
    for statistics in found:
        count = len(statistics.names)
        assert len(statistics.sizes) == len(statistics.eigenvalues) == len(statistics.common) == count
        assert statistics.A.shape == ((count,) if coupling == "none" else (count, count))
        dense = torch.diag(statistics.A) if coupling == "none" else statistics.A
        torch.testing.assert_close(statistics.eigenvalues, torch.linalg.eigvalsh(dense), rtol=1e-9, atol=1e-9)
        assert statistics.eigenvalues[0] > -1e-9
        assert statistics.condition >= 1
        assert f"{count:,} blocks" in statistics.describe()
    names = [name for statistics in found for name in statistics.names]
    assert names[0].startswith("0.weight")
    assert len(set(names)) == len(names)


def test_the_matrix_of_the_full_method_is_the_sum_of_outer_products():
    param = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = AdaGradFull([param])
    rows = torch.tensor([[1.0, 2.0, 0.0], [0.5, -1.0, 3.0]], dtype=torch.float64)
    for g in rows:
        param.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(optimizer.block_statistics()[0].A, rows.T @ rows)


def test_the_matrix_of_adam_is_the_normalised_average():
    param = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    optimizer = AdamBMA([param], betas=(0.9, 0.8), coupling="all")
    rng = torch.Generator().manual_seed(0)
    U, r = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(7):
        param.grad = torch.randn(2, 3, generator=rng, dtype=torch.float64)
        U = 0.8 * U + 0.2 * torch.outer(param.grad.sum(1), param.grad.sum(1))
        r = 0.8 * r + 0.2 * param.grad.square()
        optimizer.step()
    n = r.sum(1).sqrt()
    torch.testing.assert_close(optimizer.block_statistics()[0].A, U / torch.outer(n, n))


def test_share_of_the_correction_is_what_was_taken_from_the_common_direction():
    """A row of four equal gradients has A_ii = 4, so the correction halves its step along the common direction."""
    param = torch.zeros(1, 4, requires_grad=True)
    optimizer = AdamBMA([param], eps=0.0)
    param.grad = torch.ones(1, 4)
    optimizer.step()
    statistics = optimizer.block_statistics()[0]
    assert float(statistics.diagonal[0]) == pytest.approx(4)
    assert statistics.correction_share == pytest.approx(0.5)


def test_asking_changes_nothing_and_costs_nothing_before_the_first_step():
    param = torch.zeros(4, 3, requires_grad=True)
    optimizer = AdamBMA([param])
    assert optimizer.block_statistics() == []
    param.grad = torch.ones(4, 3)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    optimizer.block_statistics()
    assert before.keys() == optimizer.state[param].keys()
    assert all(torch.equal(before[key], value) for key, value in optimizer.state[param].items())
    assert torch.equal(param.grad, torch.ones(4, 3))


def test_after_loading_the_matrix_is_there_and_the_last_step_is_not():
    model, optimizer = trained(lambda p: AdamBMA(p, coupling="all"))
    other = AdamBMA(model.named_parameters(), coupling="all")
    other.load_state_dict(optimizer.state_dict())
    mine, loaded = optimizer.block_statistics()[0], other.block_statistics()[0]
    assert torch.equal(mine.A, loaded.A)
    assert loaded.correction_share is None
    assert mine.correction_share > 0
    assert "-" in loaded.describe()


def regression(inputs, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = AdamBMA(model.named_parameters(), **options)
    rng = torch.Generator().manual_seed(0)
    for _ in range(40):
        x = inputs(rng)
        optimizer.zero_grad()
        (model(x).squeeze(-1) - x[:, 0]).square().mean().backward()
        optimizer.step()
    return optimizer


def test_diagnosis_tells_inputs_of_one_sign_from_centred_ones():
    positive = diagnose(regression(lambda rng: torch.rand(32, 50, generator=rng)))
    centred = diagnose(regression(lambda rng: torch.randn(32, 50, generator=rng)))
    assert positive.matters
    assert not centred.matters
    assert positive.by_parameter["0.weight"] > 0.5 > centred.by_parameter["0.weight"]
    assert "should matter" in str(positive)
    assert "little to work on" in str(centred)
    assert positive.steps == 40


def test_diagnosis_says_when_it_is_too_early():
    layer = nn.Linear(3, 2)
    optimizer = AdamBMA(layer.named_parameters())
    with pytest.raises(
        ValueError, match=r"take some steps .*, with correction=True for a tensor with two dims or more\.$"
    ):
        diagnose(optimizer)
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    assert "Too early" in str(diagnose(optimizer))


def test_without_a_correction_there_is_nothing_to_diagnose():
    _, optimizer = trained(lambda p: AdamBMA(p, correction=False))
    with pytest.raises(ValueError, match=r"nothing to diagnose yet: .*, with correction=True"):
        diagnose(optimizer)


def test_what_anova_needs_is_said_in_its_own_words():
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"take some steps .*, with means other than 0 for a matrix\.$"):
        diagnose(Anova(layer.named_parameters()))


@pytest.mark.parametrize("make", [lambda p: AdaGradBMA(p), lambda p: NaturalGradientBMA(p), lambda p: AdaGradFull(p)])
def test_diagnosis_is_refused_where_the_diagonal_says_nothing(make):
    _, optimizer = trained(make)
    with pytest.raises(ValueError, match="does not measure the diagonal"):
        diagnose(optimizer)


def test_statistics_are_there_after_the_correction_was_switched_off():
    _, optimizer = trained(lambda p: AdamBMA(p, coupling="all"))
    before = optimizer.block_statistics()[0].A
    optimizer.param_groups[0]["correction"] = False
    assert torch.equal(optimizer.block_statistics()[0].A, before)


def test_diagnosis_keeps_parameters_of_different_groups_apart():
    a, b = (torch.zeros(4, 3, requires_grad=True) for _ in range(2))
    optimizer = AdamBMA([{"params": [a]}, {"params": [b]}])
    for param in (a, b):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert list(diagnose(optimizer).by_parameter) == ["group 0: param0", "group 1: param0"]
    with pytest.raises(TypeError, match=r"of diagnose must be Anova, AdamBMA or AdaGradBMA. Got 'SGD'"):
        diagnose(torch.optim.SGD([a], lr=0.1))
