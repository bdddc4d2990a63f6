"""Shared by all curvature functions: the choice of parameters and blocks, the pass over the data, and all checks.

The loss of sample n is ℓ_n = loss_fn(model(x_n), y_n) on a batch of that sample alone. `reduction` says how loss_fn
combines a batch: "mean", (1/N) Σ ℓ_n, or "sum", Σ ℓ_n. All matrices belong to that loss over all of `data`: every
sample has the same weight, whatever the sizes of the batches.
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

ROW_BYTES = 2**26  # for the rows of one pass by default; the rest of a pass takes a small multiple of it
LARGEST_CHECK = 16  # samples of a batch that are checked
LARGEST_PASS = 256  # samples; more are not faster and take more memory


class Chunk(NamedTuple):
    """Samples number `start` to `start + size` − 1; inputs and targets have them along dim 0."""

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
    """A model, its loss and the chosen parameters."""

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
        self.params = _choose(owner, model, params)
        self.partition = _partition_of(owner, self.params, partition)
        for name, module in model.named_modules():
            self._refuse_batch_norm(name, module)
        self._fixed = {name: p.detach() for name, p in model.named_parameters() if name not in self.params}
        self._buffers = {name: b.detach() for name, b in model.named_buffers()}
        tensors = list(self.params.values())
        self.device = tensors[0].device
        self.dtype = torch.float32
        for tensor in tensors:
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        # Rounding of a mean over a batch stays far below this, a wrong reduction far above.
        self.tolerance = {8: 1e-8, 4: 1e-4}.get(min(t.dtype.itemsize for t in tensors), 3e-2)
        self._underflow = max(torch.finfo(t.dtype).tiny for t in tensors)
        self.offsets = torch.tensor([0, *(t.numel() for t in tensors)]).cumsum(0)
        fit = ROW_BYTES // (self.partition.num_entries * self.dtype.itemsize)
        self.rows_per_pass = chunk_size or max(1, min(LARGEST_PASS, fit))
        self.samples_per_pass = chunk_size or LARGEST_PASS
        # torch.vmap fails in nn.LSTM, nn.GRU and their cells, which write into unbatched tensors.
        self._vectorised = not any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
        self.samples = 0  # N, so far
        self.generator = generator or torch.Generator().manual_seed(0)
        self._may_be_random = generator is not None
        self.is_random: bool | None = None  # whether the model draws random numbers; unknown before the first batch
        self._seed = 0

    # ---------------------------------------------------------------- the functions that are differentiated

    def output(self, params: Tensors, inputs: Any) -> Any:
        """The model with other parameters on a batch: a tensor, a tuple of arguments or a dict of keyword arguments."""
        args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
        kwargs = inputs if isinstance(inputs, dict) else {}
        # A module may write to its buffers: give it copies, made where torch.func sees them.
        buffers = {name: b.clone() for name, b in self._buffers.items()}
        return functional_call(self.model, {**self._fixed, **buffers, **params}, args, kwargs)

    def sample_loss(self, params: Tensors, inputs: Any, targets: Any) -> Tensor:
        """ℓ_n of a single sample, given without its batch dimension."""
        return self.loss_fn(self.output(params, single(inputs)), single(targets))

    def total_loss(self, outputs: Any, chunk: Chunk) -> Tensor:
        """Σ ℓ_n over a chunk, from the outputs of the model."""
        return self._factor(chunk.size) * self.loss_fn(outputs, chunk.targets)

    def _factor(self, size: int) -> int:
        """The total loss of some samples over what loss_fn returns for them."""
        return size if self.reduction == "mean" else 1

    def evaluate(self, chunk: Chunk) -> Any:
        """The outputs of a chunk; its loss must be finite."""
        outputs = self.output(self.params, chunk.inputs)
        self.refuse_nonfinite(self.loss_fn(outputs, chunk.targets), "the loss", chunk)
        return outputs

    @property
    def weight(self) -> float:
        """The factor of the sum over all samples."""
        return 1 / self.samples if self.reduction == "mean" else 1.0

    def equation(self, term: str) -> str:
        """M as a sum over samples of a term, which may end with definitions."""
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
        """The vector with `values` at some entries, as tangents of only the tensors with such entries.

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

    # ---------------------------------------------------------------- the pass over the data

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Restore the global random state afterwards, build no outer graph, and avoid kernels without derivatives.

        The fast kernels of attention and recurrent layers can be differentiated at most once, and not forwards.
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
        """Apply a function to all elements of dim 0 at once; to one after the other if layers are recurrent."""
        if self._vectorised:
            return vmap(function, randomness="different")(*args)
        count = len(tree_leaves(args)[0])
        found = [function(*tree_map(lambda x, i=i: x[i], args)) for i in range(count)]
        return tree_map(lambda *parts: torch.stack(parts), *found)

    def chunks(self, data: Data, size: int) -> Iterator[Chunk]:
        """The data, at most `size` samples at a time, checked and counted."""
        for number, batch in enumerate(self._batches(data), start=1):
            # Checking all batches would take too long; the first is not enough, because data may be sorted.
            if number & (number - 1) == 0:
                self._check_batch(batch, size)
            for chunk in batch.split(size):
                self.samples = chunk.start + chunk.size
                self._seed = int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))
                self.reseed()
                yield chunk
        require(self.samples > 0, "data", self.owner, "at least one sample", "none")

    def reseed(self) -> None:
        """Make a random model (dropout) repeat its random numbers for this chunk."""
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

    # ---------------------------------------------------------------- checks

    def _refuse_batch_norm(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{self.owner}: '{name}' ({type(module).__name__}) normalises over the batch, so there is no loss of a "
                "single sample. Call model.eval() first, and let it track running statistics."
            )

    def _check_batch(self, batch: Chunk, size: int) -> None:
        """Check some samples of a batch, at most `size` at a time. Windows overlap, so that all weigh the same."""
        some = batch.spread(max(2, min(LARGEST_CHECK, batch.size)))
        window = max(2, min(size, some.size))
        for start in range(0, some.size - 1, window - 1):
            start = min(start, some.size - window)
            self._check(some.part(start, start + window))

    def _check(self, chunk: Chunk) -> None:
        """Is the loss a scalar, is the model random, does it mix samples, and is the loss what `reduction` says?

        Losses alone cannot answer the last question: a weighted mean equals the plain one where all losses are equal,
        as with a last layer of zeros. So the gradients in the outputs are compared too, sample by sample.
        """
        before = self._random_state()
        outputs = self.output(self.params, chunk.inputs)
        if self.is_random is None:
            self.is_random = not torch.equal(before, self._random_state())
            if self.is_random and not self._may_be_random:
                raise ValueError(
                    f"{self.owner}: the model draws random numbers (dropout in training mode?). Call model.eval() "
                    "first, or pass a generator to average over random masks."
                )
        whole = self._loss(outputs, chunk.targets)
        divisible = all(isinstance(x, Tensor) and x.shape[:1] == (chunk.size,) for x in tree_leaves(outputs))
        if not math.isfinite(whole) or (self.is_random and not divisible):
            return  # the chunk reports it; or there is no way to repeat the random outputs sample by sample
        losses, slopes, mixes = [], [], False
        for i in range(chunk.size):
            sample = chunk.part(i, i + 1)
            own = None if self.is_random else self.output(self.params, sample.inputs)
            if divisible:
                part = tree_map(lambda x, i=i: x[i : i + 1], outputs)
                slopes.append(self._slopes(part, sample.targets))
                mixes |= not self.is_random and not self._equal(own, part)
                own = part  # rounding inside the model would show in a loss near 0
            losses.append(self._loss(own, sample.targets))
        alone = torch.cat(slopes) if divisible else torch.empty(0)
        together = self._slopes(outputs, chunk.targets, self._factor(chunk.size)) if divisible else alone
        self._refuse_contradiction(whole, losses, together, alone, mixes)

    def _equal(self, outputs: Any, others: Any) -> bool:
        """Whether two outputs are equal up to rounding."""
        for a, b in zip(tree_leaves(outputs), tree_leaves(others), strict=True):
            scale = self.tolerance * float(b.nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
            same = a.shape == b.shape and torch.allclose(a, b, rtol=self.tolerance, atol=scale, equal_nan=True)
            if b.is_floating_point() and not same:
                return False
        return True

    def _loss(self, outputs: Any, targets: Any) -> float:
        loss = self.loss_fn(outputs, targets)
        scalar = isinstance(loss, Tensor) and loss.ndim == 0
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
        require(scalar, "loss_fn", self.owner, "one that returns a scalar tensor (reduction 'mean' or 'sum')", got)
        return float(loss)

    def _slopes(self, outputs: Any, targets: Any, factor: int = 1) -> Tensor:
        """The gradient of `factor` times the loss in the outputs, (samples, outputs of a sample)."""
        with torch.enable_grad():
            moved = tree_map(lambda x: x.detach().requires_grad_(x.is_floating_point()), outputs)
            # Multiplied here, n and the 1/n of a mean cancel without rounding.
            loss = factor * self.loss_fn(moved, targets)
        leaves = [x for x in tree_leaves(moved) if x.requires_grad]
        if not loss.requires_grad:
            return torch.empty(1, 0)  # the loss does not depend on the outputs
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return torch.cat([g.reshape(len(g), -1).to(self.device, torch.float64) for g in found], 1)

    def _refuse_contradiction(
        self, whole: float, losses: list[float], together: Tensor, alone: Tensor, mixes: bool
    ) -> None:
        """Raise unless loss and gradient of some samples are the mean (or sum) of those of each sample alone."""
        n, total = len(losses), sum(losses)
        bound = self.tolerance * sum(map(abs, losses)) + n * self._underflow
        slope_bound = self.tolerance * alone.abs().max() + self._underflow if alone.numel() else 0.0
        holds = {}
        for reduction, factor in (("mean", n), ("sum", 1)):
            holds[reduction] = not mixes and abs(factor * whole - total) <= bound
            if alone.isfinite().all():  # otherwise its chunk reports it
                ratio = factor / self._factor(n)
                holds[reduction] &= bool(((ratio * together - alone).abs() <= slope_bound).all())
        if holds[self.reduction]:
            return
        numbers = f"it is {whole:.6g} on {n} samples, which have a mean of {total / n:.6g} and a sum of {total:.6g}"
        other = "sum" if self.reduction == "mean" else "mean"
        if holds[other]:
            raise ValueError(
                f"The 'reduction' parameter of {self.owner} must be what loss_fn does. Got '{self.reduction}', but "
                f"the loss is a {other}: {numbers}. Pass reduction='{other}'."
            )
        raise ValueError(
            f"{self.owner}: the loss is neither the mean nor the sum of the losses of single samples: {numbers}, or "
            "its gradient weighs them differently. Class weights, ignored targets and models that mix the samples of "
            "a batch do that. Take a sum and pass reduction='sum', or take the mean over each sample first."
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
    """Load forward mode, which torch does on first use, without its warning about torch.jit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))


def _choose(owner: str, model: nn.Module, params: Params | None) -> Tensors:
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
