"""What the processes of a `Cluster` do: the same training with whole and with sharded parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blockmean

Case = tuple[str, dict[str, Any]]

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh over all processes, made once."""
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    return _meshes[shape]


def placements_of(how: str, shape: tuple[int, ...]) -> tuple[DeviceMesh, list[Any]] | None:
    """None: a plain tensor."""
    world, last = dist.get_world_size(), min(1, len(shape) - 1)
    if how == "plain" or (how == "mixed" and len(shape) == 1):
        return None
    if how in ("rows", "mixed"):
        return mesh_of(world), [Shard(0)]
    if how == "columns":
        return mesh_of(world), [Shard(last)]
    if how == "positions":  # the last dim, of convolutions a position of the kernel
        return mesh_of(world), [Shard(len(shape) - 1)]
    if how == "replicated":
        return mesh_of(world), [Replicate()]
    if how == "hybrid":  # HSDP
        return mesh_of(2, world // 2), [Replicate(), Shard(0)]
    if how == "grid":  # FSDP and tensor parallelism
        return mesh_of(2, world // 2), [Shard(0), Shard(last)] if last else [Shard(0), Replicate()]
    if how == "meshes":  # every tensor differently
        ways = ["rows", "columns", "hybrid", "grid", "plain"]
        return placements_of(ways[sum(shape) % len(ways)], shape)
    raise ValueError(how)


class Net(nn.Module):
    """Five tensors, some of them with fewer rows than processes; `order` is the order of the modules."""

    def __init__(self, how: str | None = None, order: str = "acno", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        made: dict[str, Callable[[], nn.Module]] = {
            "a": lambda: nn.Linear(7, 5),
            "c": lambda: nn.Conv2d(3, 4, 2, bias=False),
            "n": lambda: nn.Linear(5, 3, bias=False),
            "o": lambda: nn.Linear(6, 1, bias=False),
        }
        for name in order:
            self.add_module(name, made[name]().to(dtype))
        for name, module in self.named_children():
            for kind, param in list(module.named_parameters()):
                rng = torch.Generator().manual_seed(ord(name) + len(kind))
                value = torch.randn(param.shape, generator=rng, dtype=torch.float64).to(dtype)
                placed = None if how is None else placements_of(how, tuple(param.shape))
                whole = value if placed is None else distribute_tensor(value, *placed, src_data_rank=None)
                setattr(module, kind, nn.Parameter(whole))


@functools.cache
def gradient(name: str, shape: torch.Size, t: int) -> Tensor:
    """What units, inputs and layers have in common in step t, and some noise."""
    common = torch.randn((), generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    rng = torch.Generator().manual_seed(1000 * t + sum(map(ord, name)))
    value = 0.3 * torch.randn(shape, generator=rng, dtype=torch.float64) + common
    if len(shape) > 1:  # singular values far apart: otherwise U and V are not determined well by the gradients
        for k in range(min(shape[0], shape[1:].numel())):
            fixed = torch.Generator().manual_seed(k)
            u = torch.randn(shape[0], generator=fixed, dtype=torch.float64)
            v = torch.randn(shape[1:].numel(), generator=fixed, dtype=torch.float64)
            size = 4.0 ** (2 - k) * torch.randn((), generator=rng, dtype=torch.float64)
            value = value + size * torch.outer(u, v).view(shape)
    return value


def set_gradients(model: nn.Module, t: int, missing: tuple[str, ...] = ()) -> None:
    """Gradients of step t, of every parameter but those that are missing."""
    for name, param in model.named_parameters():
        value = gradient(name, param.shape, t).to(param.dtype, copy=True)
        if name in missing:
            param.grad = None
        elif isinstance(param, DTensor):
            param.grad = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        else:
            param.grad = value


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole."""
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


def optimizer_of(case: Case, model: nn.Module) -> Any:
    cls, options = case
    return getattr(blockmean, cls)(model.named_parameters(), **options)


def take_steps(model: nn.Module, optimizer: Any, steps: range, absent: bool = False) -> None:
    for t in steps:
        set_gradients(model, t, ("a.weight",) if absent and t in (2, 5) else ())
        optimizer.step()


def train(case: Case, how: str | None, steps: int, absent: bool = False) -> dict[str, Tensor]:
    model = Net(how)
    take_steps(model, optimizer_of(case, model), range(steps), absent)
    return values_of(model)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two runs, relative to what the parameters have moved."""
    start = values_of(Net())
    return max(float((a[k] - b[k]).abs().max() / (b[k] - start[k].to(b[k])).abs().max()) for k in b)


def compare(cases: list[Case], hows: list[str], steps: int) -> dict[str, float]:
    """How far sharded runs end from whole ones."""
    found = {}
    for case in cases:
        whole = train(case, None, steps, absent=True)
        for how in hows:
            found[f"{case} {how}"] = difference(train(case, how, steps, absent=True), whole)
    return found


# ---------------------------------------------------------------- what is communicated


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[int, int]]]:
    """Calls and bytes of all collectives."""
    seen: list[tuple[int, int]] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((tensor.numel(), tensor.element_size()))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield seen
    finally:
        dist.all_reduce = original


def collectives(
    case: Case, how: str, steps: int, dtype: torch.dtype, grouped: bool = False
) -> list[list[tuple[int, int]]]:
    """The collectives of every step: numbers, and bytes per number. `grouped`: every tensor is a parameter group."""
    model = Net(how, dtype=dtype)
    optimizer = optimizer_of(case, model)
    if grouped:
        optimizer = type(optimizer)([{"params": [named]} for named in model.named_parameters()], **case[1])
    found = []
    for t in range(steps):
        set_gradients(model, t)
        with counted() as seen:
            optimizer.step()
        found.append(list(seen))
    return found


# ---------------------------------------------------------------- errors


def attempt(optimizer: Any) -> str:
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "stepped"


def spoil(case: Case, how: str, bad_rank: int, name: str) -> tuple[str, bool, str]:
    """A NaN on one process: what its step says, whether anything changed, and what the step after it says."""
    model = Net(how)
    optimizer = optimizer_of(case, model)
    take_steps(model, optimizer, range(2))
    before = values_of(model), copy.deepcopy(optimizer.state_dict()["state"])
    set_gradients(model, 2)
    grad = model.get_parameter(name).grad
    own = grad._local_tensor if isinstance(grad, DTensor) else grad
    if dist.get_rank() == bad_rank:
        assert own is not None and own.numel()
        own.view(-1)[0] = torch.nan
    said = attempt(optimizer)
    after = values_of(model), optimizer.state_dict()["state"]
    same = all(torch.equal(before[0][k], after[0][k]) for k in before[0]) and all(
        torch.equal(full(x), full(after[1][i][k])) for i, state in before[1].items() for k, x in state.items()
    )
    set_gradients(model, 2)
    return said, same, attempt(optimizer)


def disagree(case: Case, trouble: str) -> list[str]:
    """What two steps say if the processes differ."""
    model = Net("rows")
    odd = dist.get_rank() == 0
    if trouble == "options" and odd and case[0] != "Anova":
        case = case[0], {**case[1], "correction": False}
    if trouble == "options" and odd and case[0] == "Anova":
        case = case[0], {**case[1], "means": 1}
    optimizer = optimizer_of(case, model)
    said = []
    for t in range(3):
        set_gradients(model, t, ("a.weight",) if trouble == "gradient" and odd and t == 1 else ())
        if trouble == "failure" and odd and t == 1:
            if case[0] == "Anova":
                optimizer.param_groups[0]["refresh_every"] = 0
            else:
                optimizer.param_groups[0]["params"].pop()
        if trouble == "later" and odd and t == 1:
            key = "means" if case[0] == "Anova" else "correction"
            optimizer.param_groups[0][key] = 1 if key == "means" else False
        if trouble == "together" and t == 1:
            key = "mean_beta" if case[0] == "Anova" else "correction"
            optimizer.param_groups[0][key] = 0.9 if key == "mean_beta" else False
        said.append(attempt(optimizer))
        if trouble == "options" or (trouble == "failure" and t == 1):
            break
    return said


class Twins(nn.Module):
    """Two matrices of equal shape, by rows."""

    def __init__(self) -> None:
        super().__init__()
        for seed, name in enumerate("pq"):
            value = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            whole = distribute_tensor(value, mesh_of(dist.get_world_size()), [Shard(0)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(whole))


def differ(case: Case, trouble: str) -> list[str]:
    """What steps say if the first process differs in what the sizes of an exchange do not tell."""
    odd, (cls, options) = dist.get_rank() == 0, case
    model = Twins()
    before = optimizer_of(case, model)
    take_steps(model, before, range(3))
    saved = copy.deepcopy(before.state_dict())
    named = list(model.named_parameters())
    if trouble == "order" and odd:
        named.reverse()
    if trouble == "option" and odd:
        options = {**options, "betas": (0.8, 0.99)}
    optimizer = getattr(blockmean, cls)(named, **options)
    if trouble == "resumed" and odd:
        optimizer.load_state_dict(saved)
    said = []
    for t in range(3, 6):
        if t == 4 and (trouble == "all loaded" or (trouble == "loaded" and odd)):
            optimizer.load_state_dict(saved)
        set_gradients(model, t)
        said.append(attempt(optimizer))
    return said


def lack(case: Case) -> list[str]:
    """On a grid, a process lacks the gradient of a tensor that another one has nothing to do with."""
    model = Net("grid")  # the bias is sharded over one of the two dims
    optimizer = optimizer_of(case, model)
    said = []
    for t in range(3):
        set_gradients(model, t, ("a.bias",) if t == 1 and dist.get_rank() == 0 else ())
        said.append(attempt(optimizer))
    return said


def overflow(case: Case) -> str:
    """Gradients that are finite, and whose sums over processes are not."""
    model = Net("rows")
    optimizer = optimizer_of(case, model)
    set_gradients(model, 0)
    model.get_parameter("a.weight").grad._local_tensor.fill_(1e154)  # type: ignore[union-attr]
    return attempt(optimizer)


# ---------------------------------------------------------------- checkpoints


def save(case: Case, how: str | None, steps: int, folder: str, flatten: bool) -> dict[str, Tensor]:
    model = Net(how)
    optimizer = optimizer_of(case, model)
    take_steps(model, optimizer, range(steps))
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=folder)
    take_steps(model, optimizer, range(steps, steps + 4))
    return values_of(model)


def resume(
    case: Case, how: str | None, steps: int, folder: str, flatten: bool, order: str = "acno"
) -> dict[str, Tensor]:
    """Load a checkpoint and go on. In processes of their own, or in a single one without a process group."""
    model = Net(how, order)
    optimizer = optimizer_of(case, model)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    take_steps(model, optimizer, range(steps, steps + 4))
    return values_of(model)


def adopt_whole(case: Case, how: str) -> float:
    """Load the state dict of a whole run into a sharded one, and go on."""
    model = Net()
    optimizer = optimizer_of(case, model)
    take_steps(model, optimizer, range(5))
    sharded = Net(how)
    for name, param in sharded.named_parameters():
        value = model.get_parameter(name).detach()
        placed = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        param.data.copy_(value if placed is None else distribute_tensor(value, *placed, src_data_rank=None))
    other = optimizer_of(case, sharded)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(model, optimizer, range(5, 9))
    take_steps(sharded, other, range(5, 9))
    return difference(values_of(sharded), values_of(model))


# ---------------------------------------------------------------- PyTorch's own engine


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def fsdp(case: Case, kind: str) -> float:
    """Train with `fully_shard` on the samples of every process, and without on all of them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, world, 4, 6, generator=rng, dtype=torch.float64)
    whole, sharded = mlp(), mlp()
    if kind == "mixed":
        whole, sharded = whole.float(), sharded.float()
        inputs = inputs.float()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if kind == "mixed" else MixedPrecisionPolicy()
    offload = CPUOffloadPolicy(pin_memory=False) if kind == "offload" else OffloadPolicy()
    mesh = mesh_of(2, world // 2) if kind == "hybrid" else mesh_of(world)
    if kind == "frozen":
        for model in (whole, sharded):
            model[0].requires_grad_(False)
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    first, second = optimizer_of(case, whole), optimizer_of(case, sharded)
    for t in range(0, 12, 2):
        batches = inputs[t : t + 2] if kind == "accumulated" else inputs[t : t + 1]
        for batch in batches:
            (whole(batch.flatten(0, 1)).square().mean() / len(batches)).backward()
            (sharded(batch[rank]).square().mean() / len(batches)).backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    ends = values_of(whole), values_of(sharded)
    return max(float((ends[0][k] - ends[1][k]).abs().max()) for k in ends[0])


def describe(case: Case, how: str | None) -> Any:
    """What an optimizer knows after some steps."""
    model = Net(how)
    optimizer = optimizer_of(case, model)
    take_steps(model, optimizer, range(6))
    found = optimizer.block_statistics()
    if case[0] == "Anova":
        return [(one.parameter, one.shape, tuple(one.energy)) for one in found]
    return [(one.names, one.A, one.common, one.change) for one in found]


# ---------------------------------------------------------------- corner cases


def tensor_parallel(case: Case) -> float:
    """FSDP2 over tensor parallelism, which cut the same dim: a placement of its own."""
    mesh = mesh_of(2, 2)
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 4, 6, generator=rng, dtype=torch.float64)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    sharded = copy.deepcopy(whole)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(sharded, mesh["inner"], plan)
    fully_shard(sharded, mesh=mesh["outer"])
    assert any("Strided" in str(param.placements) for param in sharded.parameters() if isinstance(param, DTensor))
    optimizers = optimizer_of(case, whole), optimizer_of(case, sharded)
    for batch in inputs:
        for model, optimizer in zip((whole, sharded), optimizers, strict=True):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ends = values_of(whole), values_of(sharded)
    return max(float((ends[0][k] - ends[1][k]).abs().max()) for k in ends[0])


def differ_on_a_grid(case: Case) -> str:
    """One process of a grid differs; another one shares no process group with it."""
    model = Net("grid")
    odd = dist.get_rank() == 0
    changed = {"means": 1} if case[0] == "Anova" else {"correction": False}
    optimizer = optimizer_of((case[0], {**case[1], **(changed if odd else {})}), model)
    set_gradients(model, 0)
    return attempt(optimizer)


def events(how: str | None, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Anova that takes over from AdamW, with a gradient of zero at first."""
    model = Net(how, dtype=dtype)
    adamw = torch.optim.AdamW(model.named_parameters())
    take_steps(model, adamw, range(3))
    optimizer = optimizer_of(("Anova", {"means": (2, 1), "refresh_every": 2}), model)
    optimizer.load_state_dict(adamw.state_dict())
    keys = []
    for t in range(3, 12):
        set_gradients(model, t)
        if t == 3:
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
        optimizer.step()
        keys.append(sorted({key for state in optimizer.state.values() for key in state}))
    return values_of(model), keys


def event_difference(how: str, dtype: torch.dtype) -> tuple[float, list[list[str]]]:
    (whole, _), (found, keys) = events(None, dtype), events(how, dtype)
    return max(float((found[k] - whole[k]).abs().max()) for k in whole), keys


def turned(noise: float, scale: float, how: str | None) -> list[bool]:
    """Whether U follows the gradients of a float32 matrix that are nearly of rank one, at every turn."""
    rng = torch.Generator().manual_seed(0)
    u, v = torch.randn(64, 1, generator=rng), torch.randn(1, 48, generator=rng)
    value = torch.randn(64, 48, generator=rng)
    placed = None if how is None else placements_of(how, (64, 48))
    param = nn.Parameter(value if placed is None else distribute_tensor(value, *placed, src_data_rank=None))
    optimizer = blockmean.Anova([param], refresh_every=3, fused=False)
    found = []
    for t in range(9):
        grad = scale * (u @ v * torch.randn(1, generator=rng) + noise * torch.randn(64, 48, generator=rng))
        param.grad = grad if placed is None else distribute_tensor(grad, *placed, src_data_rank=None)
        before = full(optimizer.state[param]["unit_means"])[:, :14].clone() if t else None  # U
        optimizer.step()
        if t and t % 3 == 2:
            found.append(not torch.equal(before, full(optimizer.state[param]["unit_means"])[:, :14]))
    return found


def channels_last(how: str) -> float:
    """AdamW's moments of a convolution with its channels last go on in Anova."""
    ends = []
    for kind in (None, how):
        model = nn.Conv2d(3, 4, 2, bias=False).double()
        value = Net().c.weight.detach().to(memory_format=torch.channels_last)
        placed = None if kind is None else placements_of(kind, (4, 3, 2, 2))
        model.weight = nn.Parameter(value if placed is None else distribute_tensor(value, *placed, src_data_rank=None))
        before = torch.optim.AdamW(model.parameters())
        take_steps(model, before, range(3))
        after = blockmean.Anova(model.named_parameters(), means=2)
        after.load_state_dict(before.state_dict())
        take_steps(model, after, range(3, 9))
        ends.append(full(model.weight.detach()))
    return float((ends[0] - ends[1]).abs().max())


def partial_gradient(case: Case) -> float:
    """Gradients that are still sums over processes, as tensor parallelism may leave them."""
    ends = []
    for kind in (None, "replicated"):
        model = Net(kind)
        optimizer = optimizer_of(case, model)
        for t in range(4):
            set_gradients(model, t)
            for param in model.parameters() if kind else ():
                own = param.grad._local_tensor / dist.get_world_size()
                param.grad = DTensor.from_local(own, param.device_mesh, [Partial()])
            optimizer.step()
        ends.append(values_of(model))
    return difference(ends[1], ends[0])


class Conv1D(nn.Module):
    """Stores (in, out), as the module of this name in transformers does."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def transposed(case: Case) -> float:
    """Train modules that store (in, out), each of them sharded for itself."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = torch.randn(4, world, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    whole = nn.Sequential(Conv1D(9, 6), nn.Tanh(), Conv1D(5, 9)).double()
    sharded = copy.deepcopy(whole)
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module, mesh=mesh_of(world))
    first, second = (getattr(blockmean, case[0])(model, **case[1]) for model in (whole, sharded))
    for batch in inputs:
        whole(batch.flatten(0, 1)).square().mean().backward()
        sharded(batch[rank]).square().mean().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    ends = values_of(whole), values_of(sharded)
    return max(float((ends[0][k] - ends[1][k]).abs().max()) for k in ends[0])


def adapted_damping() -> tuple[float, float, float]:
    """NaturalGradientBMA under HSDP, whose replicas see other samples: its damping, that of one process, and the error
    of the parameters."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = torch.randn(12, world, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, sharded = mlp(), mlp()
    fully_shard(sharded, mesh=mesh_of(2, world // 2))
    dampings = []
    for model in (whole, sharded):
        optimizer = blockmean.NaturalGradientBMA(model.named_parameters(), lr=0.1, adapt_damping=True)
        for batch in inputs:
            own = batch.flatten(0, 1) if model is whole else batch[rank]

            def closure(model: nn.Module = model, own: Tensor = own, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(own).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        dampings.append(optimizer.param_groups[0]["damping"])
    ends = values_of(whole), values_of(sharded)
    return dampings[0], dampings[1], max(float((ends[0][k] - ends[1][k]).abs().max()) for k in ends[0])


def after_adamw(case: Case) -> tuple[set[int], float]:
    """Go on with the state of AdamW, sharded and whole: the steps of the state that was loaded, and the error."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = torch.randn(9, world, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends, steps = [], set()
    for model in (mlp(), fully_shard(mlp(), mesh=mesh_of(world))):
        is_sharded = any(isinstance(param, DTensor) for param in model.parameters())
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        for t, batch in enumerate(inputs):
            if t == 4:
                saved = get_optimizer_state_dict(model, optimizer)
                optimizer = optimizer_of(case, model)
                set_optimizer_state_dict(model, optimizer, saved)
                steps |= {int(state["step"]) for state in optimizer.state.values()}
            model(batch[rank] if is_sharded else batch.flatten(0, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(values_of(model))
    return steps, max(float((ends[0][k] - ends[1][k]).abs().max()) for k in ends[0])


# ---------------------------------------------------------------- flattened parameters, late sharding, replicas


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def construct(wrap: str, classes: tuple[str, ...]) -> list[str]:
    """What the constructors of these optimizers say to a model that torch.distributed has wrapped."""
    model = two_layers()
    wrapped: nn.Module
    if wrap == "fully_shard":
        wrapped = fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            original = wrap == "original parameters"
            wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    said = []
    for name in classes:
        try:
            getattr(blockmean, name)(wrapped.parameters())
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    return said


def shard_later() -> bool:
    """Whether a model whose optimizer was there before its shards steps as one that is never sharded."""
    later, alone = nn.Linear(3, 2), nn.Linear(3, 2)
    for model in (later, alone):
        model.load_state_dict({"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([1.0, -1.0])})
    optimizers = [blockmean.AdamBMA(model.named_parameters()) for model in (later, alone)]
    fully_shard(later, mesh=mesh_of(dist.get_world_size()))
    optimizers[0].param_groups[0]["params"] = list(later.parameters())
    for model, optimizer in zip((later, alone), optimizers, strict=True):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    ends = values_of(later), values_of(alone)
    return all(torch.allclose(ends[0][name], ends[1][name]) for name in ends[1])


def replicate() -> bool:
    """Whether a model inside DistributedDataParallel ends bit by bit where the model alone does."""
    alone = two_layers()
    wrapped = DistributedDataParallel(two_layers())
    optimizers = [blockmean.AdamBMA(model.named_parameters(), lr=0.01) for model in (wrapped, alone)]
    for t in range(3):
        for model, optimizer in zip((wrapped, alone), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 6) * t).square().sum().backward()
            optimizer.step()
    return all(torch.equal(a, b) for a, b in zip(wrapped.parameters(), alone.parameters(), strict=True))
