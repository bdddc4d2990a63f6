"""Parameters that torch.distributed has flattened, or shards where they cannot be: refused, never updated wrongly."""

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from blockmean import AdaGradBMA, AdaGradFull, AdamBMA, NaturalGradientBMA
dist.init_process_group("gloo", rank=0, world_size=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
wrapped = {wrap}
for cls in (AdaGradBMA, AdaGradFull, AdamBMA, NaturalGradientBMA):
    try:
        cls(wrapped.parameters())
        print(cls.__name__, "accepted")
    except ValueError as error:
        print(error)
{more}
dist.destroy_process_group()
"""


def run(wrap, more=""):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(wrap=wrap, more=more)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("orig", ["False", "True"])
def test_flat_parameters_of_the_first_fsdp_are_refused(orig):
    lines = run(f"FullyShardedDataParallel(model, use_orig_params={orig}, device_id=torch.device('cpu'))")
    assert len(lines) == 4
    for line in lines:
        assert "cannot see the blocks of parameters that FullyShardedDataParallel has flattened" in line


@pytest.mark.slow
def test_the_full_matrix_refuses_shards():
    lines = run("fully_shard(model)")
    refused = [line for line in lines if "accepted" not in line]
    assert len(lines) == 4 and len(refused) == 1
    assert "AdaGradFull needs all entries of all gradients in one place" in refused[0]


@pytest.mark.slow
def test_a_model_that_is_sharded_later_goes_on():
    late = """
later, alone = nn.Linear(3, 2), nn.Linear(3, 2)
alone.load_state_dict(later.state_dict())
optimizers = [AdamBMA(m.named_parameters()) for m in (later, alone)]
fully_shard(later)
optimizers[0].param_groups[0]["params"] = list(later.parameters())
for m, optimizer in zip((later, alone), optimizers):
    m(torch.ones(1, 3)).sum().backward()
    optimizer.step()
print(all(torch.allclose(a.full_tensor(), b) for a, b in zip(later.parameters(), alone.parameters())))
"""
    assert run("model", late)[-1] == "True"


@pytest.mark.slow
def test_distributed_data_parallel_steps_as_the_model_alone():
    same = """
import copy
from torch.nn.parallel import DistributedDataParallel
alone = copy.deepcopy(model)
both = (DistributedDataParallel(model), alone)
optimizers = [AdamBMA(m.named_parameters(), lr=0.01) for m in both]
for t in range(3):
    for m, optimizer in zip(both, optimizers):
        optimizer.zero_grad()
        m(torch.ones(2, 6) * t).square().sum().backward()
        optimizer.step()
print(all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters())))
"""
    assert run("model", same)[-1] == "True"
