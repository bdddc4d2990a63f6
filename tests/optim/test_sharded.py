"""Parameters that torch.distributed has flattened, or shards where they cannot be: refused, never updated wrongly."""

import pytest

from support import sharded

CLASSES = ("AdaGradBMA", "AdaGradFull", "AdamBMA", "NaturalGradientBMA", "Anova")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("wrap", ["flat parameters", "original parameters"])
def test_flat_parameters_of_the_first_fsdp_are_refused(wrap, two):
    for said in two.run(sharded.construct, wrap, CLASSES):
        assert len(said) == len(CLASSES)
        for one in said:
            assert "cannot see the blocks of parameters that FullyShardedDataParallel has flattened" in one


def test_the_full_matrix_refuses_shards(two):
    for said in two.run(sharded.construct, "fully_shard", CLASSES):
        assert [one == "accepted" for one in said] == [name != "AdaGradFull" for name in CLASSES]
        assert "AdaGradFull needs all entries of all gradients in one place" in said[1]


def test_a_model_that_is_sharded_later_goes_on(two):
    assert two.run(sharded.shard_later) == [True, True]


def test_distributed_data_parallel_steps_as_the_model_alone(two):
    assert two.run(sharded.replicate) == [True, True]
