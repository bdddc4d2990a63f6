"""What Anova reports about itself: the shares of means in `block_statistics`, and `diagnose`."""

import math

import pytest
import torch
from torch import nn

from blockmean import AdamBMA, Anova, diagnose
from blockmean.optim import MeanStatistics
from support.optimizers import bases

NEVER = 10**6  # steps from one refresh to the next


def take_steps(optimizer, params, count, seed=0, scale=1.0):
    """Steps with gradients of independent noise; returns those of every step."""
    rng, taken = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        for param in params:
            param.grad = scale * torch.randn(param.shape, generator=rng, dtype=param.dtype)
        optimizer.step()
        taken.append([param.grad for param in params])
    return taken


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def trained(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 10))
    optimizer = Anova(model.named_parameters(), **options)
    rng = torch.Generator().manual_seed(0)
    for _ in range(30):
        inputs = torch.rand(16, 20, generator=rng)  # never negative
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1)).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("means", [(3, 2), (2, 0), (0, 4), 1, (9, 12), (9, 3)])
@pytest.mark.parametrize("shape", [(9, 12), (9, 3, 2, 2)])
def test_shares_equal_those_of_the_recorded_gradients(shape, means):
    param = zeros(*shape)
    optimizer = Anova([param], betas=(0.9, 0.97), mean_beta=0.8, means=means, refresh_every=NEVER)
    recorded = [grads[0].view(9, 12) for grads in take_steps(optimizer, [param], 15)]
    U, V = bases(optimizer.state[param])
    onto_U, onto_V = U @ U.mT, V @ V.mT
    rest_U, rest_V = torch.eye(9).double() - onto_U, torch.eye(12).double() - onto_V
    energy = []
    for left, right, beta in (
        (onto_U, onto_V, 0.8),
        (rest_U, onto_V, 0.8),
        (onto_U, rest_V, 0.8),
        (rest_U, rest_V, 0.97),
    ):
        weights = [beta ** (14 - t) for t in range(15)]
        squares = [float((left @ G @ right).square().sum()) for G in recorded]
        energy.append(sum(w * x for w, x in zip(weights, squares, strict=True)) / sum(weights))
    (found,) = optimizer.block_statistics()
    least = 2 * 2.0**-18 * sum(energy)  # about what a remainder counts as at least
    assert found.energy == pytest.approx(energy, rel=1e-9, abs=least)
    assert found.shares == pytest.approx([x / sum(energy) for x in energy], rel=1e-5, abs=2.0**-17)
    assert sum(found.shares) == pytest.approx(1)
    assert found.shares.means == pytest.approx(1 - found.shares.remainder)


def test_shares_after_refreshes_sum_to_one_and_stay_close_to_the_gradients():
    """Second moments follow a rotation only approximately; no share is far from that of the last twenty gradients."""
    torch.manual_seed(0)
    common = torch.randn(16, 2).double() @ torch.randn(2, 24).double()
    param = zeros(16, 24)
    optimizer = Anova([param], means=4, betas=(0.9, 0.95))
    rng, seen = torch.Generator().manual_seed(1), []
    for _ in range(60):
        noise = torch.randn(16, 24, generator=rng, dtype=torch.float64)
        param.grad = common * torch.randn(1, generator=rng, dtype=torch.float64) + noise
        state = optimizer.state[param]
        if "unit_means" in state:
            (U, V), G = bases(state), param.grad
            remainder = G - U @ (U.mT @ G) - (G - U @ (U.mT @ G)) @ V @ V.mT
            seen.append((0.95 ** -len(seen) * remainder.square().sum(), 0.95 ** -len(seen) * G.square().sum()))
        optimizer.step()
    (found,) = optimizer.block_statistics()
    remainder, total = (float(sum(column)) for column in zip(*seen, strict=True))
    assert sum(found.shares) == pytest.approx(1)
    assert found.shares.remainder == pytest.approx(remainder / total, abs=0.03)


def test_noise_has_the_shares_of_chance():
    """300 steps of 20 × 30 normal numbers; four standard errors of every part."""
    param = zeros(20, 30)
    optimizer = Anova([param], means=(4, 6), mean_beta=0.98, betas=(0.9, 0.98), refresh_every=NEVER)
    take_steps(optimizer, [param], 300)
    (found,) = optimizer.block_statistics()
    assert found.degrees_of_freedom == (24, 96, 96, 384)
    assert found.chance == pytest.approx([count / 600 for count in (24, 96, 96, 384)])
    gradients = 1.98 / 0.02  # independent ones in an average with decay 0.98
    for part, count in zip(found.energy, found.degrees_of_freedom, strict=True):
        assert part / count == pytest.approx(1, abs=4 * math.sqrt(2 / (gradients * count)))


def test_learned_means_leave_noise_a_little_less_than_chance():
    param = zeros(20, 30)
    optimizer = Anova([param], means=4)
    take_steps(optimizer, [param], 300)
    (found,) = optimizer.block_statistics()
    assert 0.8 * found.chance.means < found.shares.means < 1.1 * found.chance.means


def test_one_entry_for_every_matrix_with_means_in_order():
    optimizer = trained()
    found = optimizer.block_statistics()
    assert all(isinstance(statistics, MeanStatistics) for statistics in found)
    assert [(s.group, s.parameter, s.shape, s.num_means) for s in found] == [
        (0, "0.weight", (12, 20), (6, 6)),
        (0, "2.weight", (10, 12), (5, 5)),
    ]
    assert all(s.shares.means > s.chance.means for s in found)


def test_asking_changes_nothing_and_needs_a_step():
    param = zeros(12, 10)
    optimizer = Anova([param])
    assert optimizer.block_statistics() == []
    take_steps(optimizer, [param], 2)
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    assert len(optimizer.block_statistics()) == 1
    assert before.keys() == optimizer.state[param].keys()
    assert all(torch.equal(before[key], value) for key, value in optimizer.state[param].items())


def test_without_means_there_is_nothing_to_report():
    param, bias = zeros(12, 10), zeros(6)
    optimizer = Anova([param, bias], means=0)
    take_steps(optimizer, [param, bias], 2)
    assert optimizer.block_statistics() == []
    with pytest.raises(ValueError, match=r"nothing to diagnose yet: .*, with means other than 0 for a matrix"):
        diagnose(optimizer)


def test_gradients_of_zero_are_nothing_to_diagnose():
    param = zeros(12, 10)
    param.grad = torch.zeros_like(param)
    optimizer = Anova([param])
    optimizer.step()
    with pytest.raises(ValueError, match="nothing to diagnose yet: take some steps with gradients other than zero"):
        diagnose(optimizer)


def test_means_that_started_later_are_corrected_for_their_own_age():
    param = zeros(12, 10)
    adamw = torch.optim.AdamW([param])
    take_steps(adamw, [param], 5, scale=1e-6)  # means may not be smaller than the momentum's
    optimizer = Anova([param], means=2, mean_beta=0.9, refresh_every=NEVER)
    optimizer.load_state_dict(adamw.state_dict())
    optimizer.param_groups[0]["mean_beta"] = 0.9
    recorded = [grads[0] for grads in take_steps(optimizer, [param], 3, seed=1)]
    U, _ = bases(optimizer.state[param])
    weights = [0.81, 0.9, 1.0]
    squares = [float((U.mT @ G).square().sum()) for G in recorded]
    (found,) = optimizer.block_statistics()
    expected = sum(w * x for w, x in zip(weights, squares, strict=True)) / sum(weights)
    assert found.energy.grand + found.energy.per_input == pytest.approx(expected, rel=1e-6)


def test_groups_and_parameters_without_names_are_told_apart():
    a, bias, b = zeros(12, 10), zeros(5), zeros(9, 10)
    optimizer = Anova([{"params": [bias, a]}, {"params": [b], "mean_beta": 0.5}])
    take_steps(optimizer, [a, bias, b], 3)
    assert [(s.group, s.parameter) for s in optimizer.block_statistics()] == [(0, "param1"), (1, "param0")]
    assert list(diagnose(optimizer).by_parameter) == ["group 0: param1", "group 1: param0"]


def test_loaded_and_half_precision_states_report_the_same():
    param = zeros(12, 10, dtype=torch.bfloat16)
    optimizer = Anova([param])
    take_steps(optimizer, [param], 4)
    other = Anova([param])
    other.load_state_dict(optimizer.state_dict())
    assert other.block_statistics() == optimizer.block_statistics()
    assert sum(other.block_statistics()[0].shares) == pytest.approx(1)


def test_a_matrix_without_a_gradient_has_no_shares():
    param, dead = zeros(12, 10), zeros(12, 10)
    optimizer = Anova([param, dead])
    for _ in range(3):
        param.grad, dead.grad = torch.ones_like(param), torch.zeros_like(dead)
        optimizer.step()
    alive, nothing = optimizer.block_statistics()
    assert sum(alive.shares) == pytest.approx(1)
    assert all(math.isnan(share) for share in nothing.shares)
    assert nothing.describe().splitlines()[1].split()[-2:] == ["-", "20.8%"]
    assert list(diagnose(optimizer).by_parameter) == ["param0"]


def test_description_is_a_table_of_the_four_parts():
    optimizer = trained(means=(2, 1))
    lines = optimizer.block_statistics()[0].describe().splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [
        "part",
        "grand means",
        "means per unit",
        "means per input",
        "remainder",
    ]
    assert [line.split()[-3] for line in lines[1:-1]] == ["2", "10", "38", "190"]
    assert lines[-1] == "0.weight: 12 units, 20 inputs; 2 means over units, 1 over inputs"


# ---------------------------------------------------------------- diagnose


def test_diagnosis_compares_the_share_of_means_with_chance():
    optimizer = trained()
    found, parts = diagnose(optimizer), optimizer.block_statistics()
    assert found.by_parameter == pytest.approx({s.parameter: s.shares.means for s in parts})
    assert found.chance_by_parameter == pytest.approx({s.parameter: s.chance.means for s in parts})
    assert found.share == pytest.approx(sum(s.entries * s.shares.means for s in parts) / 360)
    assert found.chance == pytest.approx(sum(s.entries * s.chance.means for s in parts) / 360)
    assert found.steps == 30
    assert found.matters is None  # the thresholds were measured for another method
    text = str(found)
    assert f"The means hold {found.share / found.chance:.1f} times the energy" in text
    assert "compare with means=0" in text
    assert "correction" not in text


def test_diagnosis_says_when_it_is_too_early():
    param = zeros(12, 10)
    optimizer = Anova([param])
    with pytest.raises(ValueError, match=r"nothing to diagnose yet: .*, with means other than 0"):
        diagnose(optimizer)
    take_steps(optimizer, [param], 3)
    assert "Too early" in str(diagnose(optimizer))


def test_diagnosis_of_other_optimizers_has_chance_per_parameter():
    layer = nn.Linear(4, 2, bias=False)
    optimizer = AdamBMA(layer.named_parameters())
    layer(torch.ones(4)).sum().backward()
    optimizer.step()
    found = diagnose(optimizer)
    assert found.chance_by_parameter == {"weight": 0.25}
    assert found.switch == "correction=False"
