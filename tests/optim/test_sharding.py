"""Sharded parameters, with real processes: exact steps, few collectives, errors on all processes, checkpoints."""

import os
import re
import subprocess
import sys

import pytest
import torch

from blockmean import AdamBMA, Anova
from blockmean.optim import sharding
from blockmean.optim.base import process_groups
from support import sharded

pytestmark = pytest.mark.slow

CASES = [
    ("AdamBMA", {}),
    ("AdamBMA", {"coupling": "all"}),
    ("AdamBMA", {"partition": "kernel", "coupling": "module", "weight_decay": 0.1}),
    ("AdamBMA", {"partition": "all", "fused": False}),
    ("AdamBMA", {"correction_cap": 0.5, "maximize": True}),
    ("AdamBMA", {"coupling": "all", "refresh_every": 3}),
    ("AdamBMA", {"correction": False}),
    ("AdaGradBMA", {}),
    ("AdaGradBMA", {"variant": "consistent", "partition": "module"}),
    ("AdaGradBMA", {"variant": "weighted", "partition": "unit", "weight_decay": 0.1, "lr_decay": 0.01}),
    ("NaturalGradientBMA", {"lr": 0.01}),
    ("NaturalGradientBMA", {"lr": 0.01, "coupling": "all"}),
    ("Anova", {"means": 2}),
    ("Anova", {"means": (2, 3), "refresh_every": 2}),
    ("Anova", {"means": (2, 0)}),
    ("Anova", {"means": 1, "maximize": True}),
    ("Anova", {"means": 0}),
]
SEVERAL = [CASES[0], CASES[1], CASES[7], CASES[10], CASES[12]]
NAMES = [f"{cls}-{'-'.join(map(str, options.values()))}" for cls, options in CASES]


def bound(case):
    """Relative errors. Anova's means may be as small as 2^-19 of a gradient before their steps shrink, so that rounding
    errors of the gradient grow by 2^19."""
    return 2.0**19 * torch.finfo(torch.float64).eps if case[0] == "Anova" else 1e-12


def assert_exact(found, case):
    for of_rank in found:
        for what, error in of_rank.items():
            assert error <= bound(case), f"{what}: {error}"


# Three refreshes of Anova, missing gradients included; longer runs let errors grow.
few_or_many_steps = pytest.mark.parametrize("steps", [16, pytest.param(50, marks=pytest.mark.study)])


@few_or_many_steps
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_two_processes_end_where_one_does(case, steps, two):
    hows = ["rows", "columns", "mixed", "positions", "replicated"]
    assert_exact(two.run(sharded.compare, [case], hows, steps), case)


@few_or_many_steps
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_four_processes_end_where_one_does(case, steps, four):
    """Shards are uneven, and some are empty."""
    assert_exact(four.run(sharded.compare, [case], ["rows", "hybrid", "grid", "meshes"], steps), case)


# ---------------------------------------------------------------- what is communicated

ENTRIES = 5 * 7 + 5 + 4 * 3 * 2 * 2 + 3 * 5 + 6
UNITS = 5 + 4 + 3 + 1  # and one block for the bias, which is not corrected


def test_a_step_takes_one_small_collective(two):
    """Four rows of sums per block, whether every tensor has a gradient, and five flags."""
    for first, *others in two.run(sharded.collectives, ("AdamBMA", {}), "rows", 4, torch.float32):
        assert len(first) == 2  # the processes have not agreed yet on what they exchange
        assert others == [[(5 + 4 * (UNITS + 1) + 5, 8)]] * 3


def test_anova_takes_two_collectives_and_five_where_means_turn(two):
    found = two.run(sharded.collectives, ("Anova", {"means": (2, 1), "refresh_every": 4}), "rows", 9, torch.float32)
    units, inputs, matrices, with_means = 5 + 4 + 3, 7 + 12 + 5, 4, 3
    for steps in found:
        for t, calls in enumerate(steps[1:], 2):
            assert len(calls) == (5 if t % 4 == 0 else 2), t
            # Uᵀ G, Uᵀ G V and the length of every matrix; whether there is a gradient, and five flags.
            assert calls[0] == (2 * inputs + 3 * with_means + matrices + 1 + 5, 4)
            # The squares of R; before a turn, which rows and columns of U are not zero.
            assert calls[1] == (with_means + (units + 2 * with_means) * (t % 4 == 0), 4)


@pytest.mark.parametrize(("case", "calls"), [(CASES[0], [1]), (("Anova", {"means": 2}), [2, 5])], ids=str)
def test_all_parameter_groups_share_the_collectives_of_a_step(case, calls, two):
    for steps in two.run(sharded.collectives, case, "rows", 6, torch.float32, True):
        assert sorted({len(seen) for seen in steps[1:]}) == calls


def test_hybrid_shards_talk_to_their_own_group_only(four):
    found = four.run(sharded.collectives, ("AdamBMA", {}), "hybrid", 3, torch.float32)
    assert all(len(calls) == 1 for steps in found for calls in steps[1:])


def test_two_process_groups_take_one_collective_each(four):
    for steps in four.run(sharded.collectives, ("AdamBMA", {}), "grid", 3, torch.float32):
        assert [len(calls) for calls in steps[1:]] == [2, 2]


@pytest.mark.parametrize("how", ["plain", "replicated"])
@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_nothing_is_communicated_without_shards(case, how, two):
    for steps in two.run(sharded.collectives, case, how, 3, torch.float32):
        assert steps == [[], [], []]


def test_a_single_process_needs_no_process_group():
    code = (
        "import sys, torch; before = set(sys.modules); import blockmean\n"
        "assert 'torch.distributed.tensor' not in set(sys.modules) - before\n"
        "p = torch.nn.Parameter(torch.ones(4, 5)); o = blockmean.Anova([p]); p.grad = torch.rand(4, 5); o.step()\n"
        "assert not torch.distributed.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=120)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("how", ["rows", "columns", "mixed"])
@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_bad_gradients_of_one_process_stop_all(case, how, two):
    name = "a.bias" if how == "mixed" else "a.weight"  # a plain tensor beside sharded ones
    found = two.run(sharded.spoil, case, how, 1, name)
    for rank, (said, same, after) in enumerate(found):
        assert said.startswith("ValueError: The gradient of" if rank == 1 else "ValueError: ")
        assert ("'a." in said) if rank == 1 else ("on another process is not finite" in said)
        assert "Nothing was changed" in said and same
        assert after == "stepped"


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_all_processes_skip_the_same_steps(case, two):
    skipping = case[0], {**case[1], "nonfinite": "skip"}
    for how, name in (("rows", "a.weight"), ("mixed", "a.bias")):
        for said, same, after in two.run(sharded.spoil, skipping, how, 0, name):
            assert (said, same, after) == ("stepped", True, "stepped")


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_processes_that_differ_say_so_and_do_not_wait(case, two):
    for said in two.run(sharded.disagree, case, "options"):
        assert "The processes disagree about the sharded parameters" in said[0]
    expected = "The processes disagree about the sharded parameters"
    if case[0] == "Anova":  # which does not take another number of means
        expected = "Construct Anova anew|Another process failed in this step"
    for said in two.run(sharded.disagree, case, "later"):
        assert said[0] == "stepped"
        assert re.search(expected, said[1])


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_a_gradient_that_some_processes_lack_is_an_error_on_all(case, two):
    for said in two.run(sharded.disagree, case, "gradient"):
        assert said[0] == "stepped" and said[2] == "stepped"
        assert "has a gradient on some of the processes only" in said[1]


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_also_on_those_that_have_no_other_part_of_it(case, four):
    for said in four.run(sharded.lack, case):
        assert said[0] == "stepped" and said[2] == "stepped"
        assert "has a gradient on some of the processes only" in said[1]


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
@pytest.mark.parametrize("trouble", ["order", "option", "resumed"])
def test_processes_compare_names_options_and_steps_when_they_meet(case, trouble, two):
    for said in two.run(sharded.differ, case, trouble):
        assert all("The processes disagree about the sharded parameters" in one for one in said)


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_state_is_loaded_by_all_processes_or_none(case, two):
    for said in two.run(sharded.differ, case, "loaded"):
        assert said[0] == "stepped"
        assert all("either all or none have loaded a state" in one for one in said[1:])
    assert two.run(sharded.differ, case, "all loaded") == [["stepped"] * 3] * 2


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_sums_that_overflow_only_together_stop_all(case, two):
    for said in two.run(sharded.overflow, case):
        assert "overflow" in said and "on another process is not finite" in said and "Nothing was changed" in said


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_an_error_on_one_process_reaches_the_others(case, two):
    broken, other = two.run(sharded.disagree, case, "failure")
    assert other[0] == "stepped" and "Another process failed in this step" in other[1]
    assert "had the shapes" in broken[1] or "'refresh_every' parameter" in broken[1]


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_options_that_all_processes_change_are_followed(case, two):
    assert two.run(sharded.disagree, case, "together") == [["stepped"] * 3] * 2


# ---------------------------------------------------------------- checkpoints


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_checkpoints_go_on_with_any_number_of_processes(case, flatten, two, four, tmp_path):
    folder = str(tmp_path / "checkpoint")
    (expected, _) = two.run(sharded.save, case, "rows", 7, folder, flatten)
    for resumed in two.run(sharded.resume, case, "rows", 7, folder, flatten):
        for name in expected:
            assert torch.equal(resumed[name], expected[name]), name
    ways = [(four, "rows"), (four, "grid"), (two, "columns"), (two, "plain")]
    for cluster, how in ways:
        for resumed in cluster.run(sharded.resume, case, how, 7, folder, flatten):
            assert sharded.difference(resumed, expected) <= bound(case)
    alone = sharded.resume(case, None, 7, folder, flatten)
    assert sharded.difference(alone, expected) <= bound(case)


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_checkpoints_load_by_name_in_another_order(case, two, tmp_path):
    folder = str(tmp_path / "checkpoint")
    expected, _ = two.run(sharded.save, case, "rows", 7, folder, False)
    for resumed in two.run(sharded.resume, case, "rows", 7, folder, False, "ncoa"):
        assert sharded.difference(resumed, expected) <= bound(case)


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_the_sharded_state_of_adamw_goes_on(case, two):
    for steps, error in two.run(sharded.after_adamw, case):
        assert steps == {4} and error <= 1e-12


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_whole_state_is_cut_where_it_is_loaded(case, two):
    for how in ("rows", "columns"):
        assert max(two.run(sharded.adopt_whole, case, how)) <= bound(case)


# ---------------------------------------------------------------- PyTorch's own engine


@pytest.mark.parametrize("kind", ["plain", "accumulated", "frozen", "mixed", "offload"])
@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_fully_sharded_training_ends_where_training_on_all_samples_does(case, kind, two):
    allowed = 2e-4 if kind == "mixed" else 1e-9 if case[0] == "Anova" else 1e-12
    assert max(two.run(sharded.fsdp, case, kind)) <= allowed


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_hybrid_sharded_training_too(case, four):
    assert max(four.run(sharded.fsdp, case, "hybrid")) <= (1e-9 if case[0] == "Anova" else 1e-12)


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_modules_that_store_inputs_first_keep_their_units_when_sharded(case, two):
    assert max(two.run(sharded.transposed, case)) <= 1e-12


def test_replicas_that_see_other_samples_adapt_their_damping_alike(four):
    for whole, found, error in four.run(sharded.adapted_damping):
        assert whole == found != 0.1 and error <= 1e-12


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_every_process_knows_what_the_whole_optimizer_would(case, two):
    (whole, _) = two.run(sharded.describe, case, None)
    for found in two.run(sharded.describe, case, "rows"):
        for one, expected in zip(found, whole, strict=True):
            if case[0] == "Anova":
                assert one[:2] == expected[:2] and one[2] == pytest.approx(expected[2], rel=1e-9)
            else:
                assert one[0] == expected[0]
                torch.testing.assert_close(one[1:], expected[1:], rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- corner cases


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_fsdp_over_tensor_parallelism(case, four):
    assert max(four.run(sharded.tensor_parallel, case)) <= 1e-12


@pytest.mark.parametrize("case", [CASES[0], CASES[12]], ids=str)
def test_a_process_that_shares_no_group_with_the_odd_one_hears_of_it(case, four):
    for said in four.run(sharded.differ_on_a_grid, case):
        assert "The processes disagree about the sharded parameters" in said


@pytest.mark.parametrize("how", ["rows", "columns"])
def test_means_that_come_and_go_leave_equal_states(how, four):
    """Also where a shard is empty, and in half precision."""
    first, *others = four.run(sharded.event_difference, how, torch.float64)
    assert first[0] <= 1e-10 and all(found[1] == first[1] for found in others)
    assert all(error <= 0.01 for error, _ in four.run(sharded.event_difference, how, torch.bfloat16))


@pytest.mark.parametrize(("noise", "scale"), [(1e-4, 1.0), (0.1, 1e10), (0.1, 1e-10)])
def test_means_turn_whatever_the_condition_and_scale_of_gradients(noise, scale, two):
    """Gram matrices are exchanged in float64: in float32 they would lose half of their digits, and overflow."""
    for how in ("rows", "columns"):
        assert two.run(sharded.turned, noise, scale, how) == [[True] * 3] * 2


def test_moments_with_channels_last_go_on(two):
    for how in ("rows", "columns"):
        assert max(two.run(sharded.channels_last, how)) <= 1e-12


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_gradients_that_are_sums_over_processes(case, two):
    assert max(two.run(sharded.partial_gradient, case)) <= bound(case)


# ---------------------------------------------------------------- without processes


def test_native_kernels_take_local_shards(two):
    for cls in ("AdamBMA", "AdaGradBMA"):
        case = (cls, {"fused": True})
        assert_exact(two.run(sharded.compare, [case], ["rows", "columns"], 5), case)


def test_sums_over_no_groups_stay_as_they_are():
    x = torch.ones(3)
    sharding.reduce([sharding.Sum(x, ())], torch.float64)
    assert torch.equal(x, torch.ones(3))


@pytest.mark.parametrize("cls", [AdamBMA, Anova])
def test_plain_parameters_have_no_sides(cls):
    param = torch.nn.Parameter(torch.ones(3, 4))
    assert sharding.sides_of(param) == sharding.WHOLE and sharding.box_of(param) is None
    assert process_groups(cls([param])) == []
