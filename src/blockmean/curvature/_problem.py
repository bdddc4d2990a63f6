"""What all curvature matrices share: which parameters, which blocks, how the data is walked, and what is refused.

The loss of sample n is ℓ_n = loss_fn(model(x_n), y_n) on a batch of that sample alone. `reduction` says how loss_fn
puts a batch together: "mean", (1/N) Σ ℓ_n, or "sum", Σ ℓ_n. All matrices belong to that loss over all of `data`: each
sample counts alike, whatever the sizes of the batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from blockmean._checks import require
from blockmean.blocks import By
from blockmean.partition import Partition

LossFn = Callable[[Any, Any], Tensor]
Data = tuple[Any, Tensor] | Iterable[Any]
Params = Collection[str] | Callable[[str, Tensor], bool]
Tensors = dict[str, Tensor]

ROW_BYTES = 2**26  # what the rows of one pass may take by default; the rest of a pass is a small multiple of it
LARGEST_CHECK = 16  # samples that tell whether the loss is what it is said to be
LARGEST_PASS = 256  # samples; more make no pass faster and every activation larger


class Chunk(NamedTuple):
    """Some samples: inputs and targets have them along dim 0, and they are number `start` to `start + size` − 1."""

    inputs: Any
    targets: Any
    size: int
    start: int

    def part(self, start: int, stop: int) -> Chunk:
        inputs, targets = tree_map(lambda x: x[start:stop], (self.inputs, self.targets))
        return Chunk(inputs, targets, min(stop, self.size) - start, self.start + start)

    def split(self, size: int) -> Iterator[Chunk]:
        return (self.part(start, start + size) for start in range(0, self.size, size))

    def spread(self, count: int) -> Chunk:
        """Some samples from all over the chunk; a lone one twice."""
        picked = torch.arange(count) * self.size // count
        inputs, targets = tree_map(lambda x: x[picked.to(x.device)], (self.inputs, self.targets))
        return Chunk(inputs, targets, count, self.start)


class Problem:
    """A model, its loss and the parameters whose curvature is asked for."""

    def __init__(
        self,
        owner: str,
        model: nn.Module,
        loss_fn: LossFn,
        partition: Partition | By,
        params: Params | None,
        reduction: str,
        chunk_size: int | None,
        generator: torch.Generator | None,
    ) -> None:
        require(isinstance(model, nn.Module), "model", owner, "a torch.nn.Module", model, TypeError)
        require(callable(loss_fn), "loss_fn", owner, "callable", loss_fn, TypeError)
        require(reduction in ("mean", "sum"), "reduction", owner, "'mean' or 'sum'", reduction)
        if chunk_size is not None:
            require_count(chunk_size, 1, "chunk_size", owner)
        self.owner, self.model, self.loss_fn, self.reduction = owner, model, loss_fn, reduction
        self.params = _chosen(owner, model, params)
        self.partition = _partition_of(owner, self.params, partition)
        for name, module in model.named_modules():
            self._refuse_coupling(name, module)
        self._fixed = {name: p.detach() for name, p in model.named_parameters() if name not in self.params}
        self._buffers = {name: b.detach() for name, b in model.named_buffers()}
        tensors = list(self.params.values())
        self.device = tensors[0].device
        self.dtype = torch.float32
        for tensor in tensors:
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        # Rounding of a mean over a batch stays far below this, a wrong reduction far above.
        self.tolerance = {8: 1e-8, 4: 1e-4}.get(min(t.dtype.itemsize for t in tensors), 3e-2)
        self.offsets = torch.tensor([0, *(t.numel() for t in tensors)]).cumsum(0)
        fit = ROW_BYTES // (self.partition.num_entries * self.dtype.itemsize)
        self.rows_per_pass = chunk_size or max(1, min(LARGEST_PASS, fit))
        self.samples_per_pass = chunk_size or LARGEST_PASS
        # torch.vmap fails in nn.LSTM, nn.GRU and their cells, which write into unbatched tensors.
        self._vectorised = not any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
        self.samples = 0  # N, as far as the data has been walked
        self.generator = generator or torch.Generator().manual_seed(0)
        self._may_be_random = generator is not None
        self.is_random: bool | None = None  # whether the model draws random numbers; not known before the first batch
        self._seed = 0

    # ---------------------------------------------------------------- the functions that are differentiated

    def output(self, params: Tensors, inputs: Any) -> Any:
        """The model with other parameters on a batch: a tensor, a tuple of arguments or a dict of keyword arguments."""
        args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
        kwargs = inputs if isinstance(inputs, dict) else {}
        # Copies of the buffers, made where torch.func sees them, for a module that writes to its own.
        buffers = {name: b.clone() for name, b in self._buffers.items()}
        return functional_call(self.model, {**self._fixed, **buffers, **params}, args, kwargs)

    def sample_loss(self, params: Tensors, inputs: Any, targets: Any) -> Tensor:
        """ℓ_n of a single sample, given without its batch dimension."""
        return self.loss_fn(self.output(params, single(inputs)), single(targets))

    def total_loss(self, outputs: Any, chunk: Chunk) -> Tensor:
        """Σ ℓ_n over a chunk, from the outputs of the model."""
        loss = self.loss_fn(outputs, chunk.targets)
        return loss * chunk.size if self.reduction == "mean" else loss

    def evaluate(self, chunk: Chunk) -> Any:
        """The outputs of a chunk, whose loss is finite."""
        outputs = self.output(self.params, chunk.inputs)
        self.refuse_nonfinite(self.loss_fn(outputs, chunk.targets), "the loss", chunk)
        return outputs

    @property
    def weight(self) -> float:
        """What the sum over all samples has to be multiplied by."""
        return 1 / self.samples if self.reduction == "mean" else 1.0

    def equation(self, term: str) -> str:
        """M as a sum over samples of a term that may go on with the meaning of its letters."""
        return f"M = 1/N Σ_n {term}, N = {self.samples:,}" if self.reduction == "mean" else f"M = Σ_n {term}"

    def flat(self, tensors: Tensors, batch_dims: int = 0) -> Tensor:
        """Parameter-shaped tensors laid end to end: (..., d), in float32 at least."""
        return torch.cat([t.flatten(batch_dims) for t in tensors.values()], -1).to(self.dtype)

    def unflat(self, x: Tensor) -> Tensors:
        """A vector (d,) cut into parameter-shaped tensors."""
        pieces = x.split([p.numel() for p in self.params.values()])
        return {n: piece.view_as(p).to(p) for (n, p), piece in zip(self.params.items(), pieces, strict=True)}

    # ---------------------------------------------------------------- directions in parameter space

    def tangent(self, entries: Tensor, values: Tensor) -> Tensors:
        """The vector with `values` at some entries, as tangents of just those tensors that have any of them.

        Derivatives along it then cost nothing in the layers before the first of these tensors.
        """
        owners = torch.searchsorted(self.offsets, entries, right=True) - 1
        names = list(self.params)
        made = {}
        for i in owners.unique().tolist():
            like = self.params[names[i]]
            mine = owners == i
            flat = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
            flat[(entries[mine] - self.offsets[i]).to(like.device)] = values[mine].to(flat)
            made[names[i]] = flat.view_as(like)
        return made

    @cached_property
    def entries(self) -> list[Tensor]:
        """The entries of each block."""
        order = self.partition.labels.argsort(stable=True)
        return list(order.split(self.partition.sizes.tolist()))

    def indicators(self) -> Iterator[Tensors]:
        """The columns of R: 1/√s_i on block i."""
        for entries in self.entries:
            yield self.tangent(entries, torch.full((len(entries),), len(entries) ** -0.5, dtype=torch.float64))

    # ---------------------------------------------------------------- walking the data

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Leave the global random numbers as they were, and build no graph around what is done inside.

        Attention and recurrent layers have fast kernels that can be differentiated once at most, and not forwards.
        """
        _load_forward_mode()
        devices = [self.device] if self.device.type == "cuda" else []
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with (
                torch.random.fork_rng(devices),
                torch.no_grad(),
                sdpa_kernel(SDPBackend.MATH),
                nullcontext() if self._vectorised else torch.backends.mkldnn.flags(False, None, None),
            ):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    def each(self, function: Callable[..., Any], *args: Any) -> Any:
        """Apply a function to every element of dim 0 at once; one after the other for recurrent layers."""
        if self._vectorised:
            return vmap(function, randomness="different")(*args)
        count = len(tree_leaves(args)[0])
        found = [function(*tree_map(lambda x, i=i: x[i], args)) for i in range(count)]
        return tree_map(lambda *parts: torch.stack(parts), *found)

    def chunks(self, data: Data, size: int) -> Iterator[Chunk]:
        """The data, at most `size` samples at a time, checked and counted."""
        for number, batch in enumerate(self._batches(data), start=1):
            # Not all batches, for that takes time; not the first alone, for data may be sorted.
            if number & (number - 1) == 0:
                self._check(batch.spread(max(2, min(size, LARGEST_CHECK, batch.size))))
            for chunk in batch.split(size):
                self.samples = chunk.start + chunk.size
                self._seed = int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))
                self.reseed()
                yield chunk
        require(self.samples > 0, "data", self.owner, "at least one sample", "none")

    def reseed(self) -> None:
        """Make a random model (dropout) draw for this chunk what it drew for it before."""
        if self.is_random:
            torch.manual_seed(self._seed)

    def signs(self, *shape: int) -> Tensor:
        """Independent random signs in float64 on the CPU."""
        draw = torch.randint(2, shape, generator=self.generator, device=self.generator.device)
        return (2 * draw - 1).double().cpu()

    def uniform(self, *shape: int) -> Tensor:
        """Independent random numbers between 0 and 1."""
        return torch.rand(shape, generator=self.generator, device=self.generator.device).to(self.device)

    def normal(self, *shape: int) -> Tensor:
        """Independent standard normal numbers."""
        return torch.randn(shape, generator=self.generator, device=self.generator.device).to(self.device)

    def refuse_nonfinite(self, values: Tensor, what: str, chunk: Chunk) -> None:
        if not bool(values.isfinite().all()):
            last = chunk.start + chunk.size - 1
            raise ValueError(
                f"{self.owner}: {what} is not finite (NaN or infinity) somewhere in samples {chunk.start} to {last}."
            )

    def _batches(self, data: Data) -> Iterator[Chunk]:
        pair = isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor)
        wanted = "a pair of tensors or an iterable of (inputs, targets)"
        iterable = isinstance(data, Iterable) and not isinstance(data, Tensor | Mapping | str)
        require(iterable, "data", self.owner, wanted, type(data), TypeError)
        start = 0
        for batch in [data] if pair else data:
            good = isinstance(batch, tuple | list) and len(batch) == 2
            require(good, "data", self.owner, wanted, f"a batch of type {type(batch).__name__}", TypeError)
            inputs, targets = batch
            inputs = tuple(inputs) if isinstance(inputs, list) else inputs
            leaves = tree_leaves((inputs, targets))
            tensors = all(isinstance(x, Tensor) and x.ndim > 0 for x in leaves)
            got = [f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
            require(tensors, "data", self.owner, "tensors with the samples along dim 0", got, TypeError)
            sizes = {len(x) for x in leaves}
            same = "as long in inputs as in targets"
            require(len(sizes) == 1, "data", self.owner, same, f"lengths {sorted(sizes)}")
            size = sizes.pop()
            if size:
                yield Chunk(inputs, targets, size, start)
            start += size

    # ---------------------------------------------------------------- what is refused

    def _refuse_coupling(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{self.owner}: '{name}' ({type(module).__name__}) normalises over the batch, so there is no loss of a "
                "single sample. Call model.eval() first, and let it track running statistics."
            )

    def _check(self, chunk: Chunk) -> None:
        """On some samples: is the loss a number, is the model random, does `reduction` tell the truth?"""
        before = self._random_state()
        outputs = self.output(self.params, chunk.inputs)
        if self.is_random is None:
            self.is_random = not torch.equal(before, self._random_state())
            if self.is_random and not self._may_be_random:
                raise ValueError(
                    f"{self.owner}: the model draws random numbers (dropout in training mode?). Call model.eval() "
                    "first, or pass a generator to take the curvature with random masks."
                )
        whole, half = self._loss(outputs, chunk.targets), chunk.size // 2
        if self.is_random and not all(isinstance(x, Tensor) and x.ndim > 0 for x in tree_leaves(outputs)):
            return  # outputs that cannot be cut, and would not be the same again
        seen = chunk._replace(inputs=outputs) if self.is_random else chunk
        losses = []
        for part in (seen.part(0, half), seen.part(half, seen.size)):
            own = part.inputs if self.is_random else self.output(self.params, part.inputs)
            losses.append((self._loss(own, part.targets), part.size))
        if math.isfinite(whole):  # or the chunk that has it is told later
            self._refuse_contradiction(whole, *losses)

    def _loss(self, outputs: Any, targets: Any) -> float:
        loss = self.loss_fn(outputs, targets)
        scalar = isinstance(loss, Tensor) and loss.numel() == 1 and loss.ndim == 0
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
        require(scalar, "loss_fn", self.owner, "one that returns a scalar tensor (reduction 'mean' or 'sum')", got)
        return float(loss)

    def _refuse_contradiction(self, whole: float, first: tuple[float, int], second: tuple[float, int]) -> None:
        (a, n), (b, m) = first, second
        promised = {"mean": (n * a + m * b) / (n + m), "sum": a + b}
        holds = {r: abs(whole - value) <= self.tolerance * (abs(a) + abs(b)) for r, value in promised.items()}
        if holds[self.reduction]:
            return
        numbers = f"it is {whole:.6g} on {n + m} samples, {a:.6g} on the first {n} and {b:.6g} on the other {m}"
        other = "sum" if self.reduction == "mean" else "mean"
        if holds[other]:
            raise ValueError(
                f"The 'reduction' parameter of {self.owner} must be what loss_fn does. Got '{self.reduction}', but "
                f"the loss is a {other}: {numbers}. Pass reduction='{other}'."
            )
        raise ValueError(
            f"{self.owner}: the loss is neither the mean nor the sum of the losses of single samples: {numbers}. "
            "Class weights, ignored targets and models that mix the samples of a batch are not supported."
        )

    def _random_state(self) -> Tensor:
        state = torch.get_rng_state()
        return torch.cat([state, torch.cuda.get_rng_state(self.device)]) if self.device.type == "cuda" else state


def require_count(value: int, least: int, name: str, owner: str) -> None:
    """Raise unless the value is a whole number and large enough."""
    require(isinstance(value, int) and not isinstance(value, bool), name, owner, "a whole number", value, TypeError)
    require(value >= least, name, owner, f"at least {least}", value)


def single(sample: Any) -> Any:
    """A sample as a batch of one."""
    return tree_map(lambda x: x.unsqueeze(0), sample)


@cache
def _load_forward_mode() -> None:
    """torch loads what forward mode needs on first use, with a warning about torch.jit that is no user's affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))


def _chosen(owner: str, model: nn.Module, params: Params | None) -> Tensors:
    """The chosen parameters in the order of the model, detached; tied ones once, under their first name."""
    named = dict(model.named_parameters())
    if params is None:
        chosen = {name for name, p in named.items() if p.requires_grad}
        require(bool(chosen), "model", owner, "one with parameters that require gradients", "none")
    elif callable(params):
        chosen = {name for name, p in named.items() if params(name, p)}
        require(bool(chosen), "params", owner, "true for at least one parameter", f"none of {list(named)}")
    else:
        params = params if isinstance(params, str) else list(params)
        require(not isinstance(params, str), "params", owner, "a collection of names or a predicate", params, TypeError)
        first = {id(p): name for name, p in named.items()}
        aliases = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        unknown = [name if isinstance(name, str) else type(name).__name__ for name in params if name not in aliases]
        require(not unknown, "params", owner, "names out of model.named_parameters()", unknown)
        chosen = {aliases[name] for name in params}
        require(bool(chosen), "params", owner, "at least one name", [])
    for name in chosen:
        p = named[name]
        real = p.is_floating_point() and p.layout == torch.strided
        require(real, "params", owner, "real and dense", f"{name!r}: {p.dtype}, {p.layout}", TypeError)
    return {name: p.detach() for name, p in named.items() if name in chosen}


def _partition_of(owner: str, params: Tensors, partition: Partition | By) -> Partition:
    if not isinstance(partition, Partition):
        return Partition.of(params, partition)
    d = sum(p.numel() for p in params.values())
    if partition.num_entries != d:
        raise ValueError(
            f"The 'partition' parameter of {owner} must have one entry for each of the {d:,} entries of the "
            f"{len(params)} chosen parameters ({', '.join(list(params)[:4])}{', ...' if len(params) > 4 else ''}). "
            f"Got {partition!r} instead."
        )
    return partition
