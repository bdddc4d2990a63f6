"""The base class of all optimizers: groups, the step, statistics between blocks, checkpoints.

    collect      plain lists of local tensors: parameters, gradients, state
    block_sums   a small array, (rows, L), in float64; nothing changes
    add_up       sums over the shards of sharded parameters, so that the rest is the same on every process
    finite?      bad gradients are noticed here, for all groups, before anything has changed
    solve        statistics between blocks → numbers per block
    apply_       state and parameters, written once

A new optimizer is one file with four hooks: `init_state`, `block_sums`, `solve`, `apply_`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as torch.optim does: torch.compiler.disable imports all of dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from blockmean._checks import require, require_choice, require_number
from blockmean._linalg import home_of
from blockmean.blocks import BY, By, NamedParameters, TensorBlocks, cut, outputs_of
from blockmean.optim import native, sharding
from blockmean.optim.inspection import BlockStatistics, eigenvalues_of
from blockmean.optim.layout import COUPLINGS, MATRIX_LIMIT, Component, Layout, Piece, Pieces
from blockmean.optim.passes import arithmetic
from blockmean.optim.sharding import Exchange, Question, Request, local, local_gradient
from blockmean.optim.statistics import State, arrange, check_places, gather, scatter, taking_part, without_gaps
from blockmean.optim.watch import Watch


@dataclass
class Work:
    """One parameter group during a step: parallel lists over the pieces of its tensors, and their block sums."""

    number: int  # index of the group
    group: dict[str, Any]
    layout: Layout
    tensors: list[Tensor]  # all parameters of the group, each once
    states: dict[int, State]  # of parameters with a gradient, by index in `tensors`
    gradients: dict[int, Tensor | None] = field(default_factory=dict)  # what is local of those of sharded tensors
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)  # None: only counts in a block that it shares with others
    moments: dict[str, list[Any]] = field(default_factory=dict)  # None where a state has no such entry
    indices: list[int] = field(default_factory=list)  # of the tensor that each piece belongs to
    steps: list[int] = field(default_factory=list)  # this step included
    cuts: list[TensorBlocks] = field(default_factory=list)
    blocks: list[slice] = field(default_factory=list)
    sums: Tensor = field(default_factory=lambda: torch.zeros(1, 0))  # (rows, L); at first of each piece, in order
    present: Tensor | None = None  # which blocks take part, (L,); None: all
    in_order: bool = True  # the blocks of all pieces, concatenated, are those of the group in order
    is_finite: bool | None = None  # whether all sums are; None if nobody has looked yet
    native: Collection[int] = ()  # tensors that native kernels take, by index
    plan: Any = None  # for the method's own use, from step to step as long as nothing changes
    pieces: list[Piece] = field(default_factory=list)  # those that take part
    is_whole: bool = False  # no tensor is in pieces
    places: list[int] = field(default_factory=list)  # of the tensor of each piece, among those in `states`
    counters: list[int] = field(default_factory=list)  # addresses of the step counts, if the kernels can read them
    watch: Watch | None = None  # sees whether the lists can serve again
    ways: tuple[Any, ...] = ()  # `foreach` and `fused`, which say how tensors are cut into pieces

    def serves_again(self, group: dict[str, Any], states: Mapping[Tensor, State]) -> bool:
        """Whether nothing has changed but gradients, steps, and options that the lists do not depend on.

        Then the lists are those of the next step.
        """
        if (
            self.watch is None
            or group is not self.group
            or group.get("partition", self.layout.partition) != self.layout.partition
            or group.get("coupling", self.layout.coupling) != self.layout.coupling
            or (group.get("foreach"), group.get("fused")) != self.ways
            or (found := self.watch.gradients(group["params"], states)) is None
        ):
            return False
        self.is_finite = None
        counts = native.read_steps(self.counters) if self.counters else [int(s["step"]) for s in self.states.values()]
        self.steps = [counts[place] + 1 for place in self.places]
        self.grads = [found[place] for place in self.places]
        if not self.is_whole:
            self.grads = [
                found[place] if piece.rows is None else found[place][slice(*piece.rows)]
                for place, piece in zip(self.places, self.pieces, strict=True)
            ]
        return True

    def gradient(self, i: int) -> Tensor | None:
        """What this process has of a gradient."""
        return self.gradients[i] if i in self.gradients else self.tensors[i].grad

    @property
    def is_sharded(self) -> bool:
        """Whether other processes have some of these tensors."""
        return self.layout.is_sharded

    def per_block(self, values: Tensor) -> list[Tensor]:
        """Split numbers per block into those of every piece."""
        if self.in_order:
            return list(values.split([blocks.stop - blocks.start for blocks in self.blocks]))
        return [values[blocks] for blocks in self.blocks]

    def in_order_of_pieces(self, values: Tensor) -> Tensor:
        """The same in one row."""
        return values if self.in_order else torch.cat([values[:0], *self.per_block(values)])


class BlockMeanOptimizer(Optimizer):
    """A `torch.optim.Optimizer` with blocks. Coupling never crosses groups; each behaves like a separate optimizer.

    Attributes:
        skipped_steps: how many steps were skipped because a gradient was not finite (nonfinite="skip").
        diagonal_fallbacks: how many eigendecompositions failed and were replaced by the diagonal step.
    """

    entry_state: ClassVar[tuple[str, ...]] = ()
    """State with one number per entry, in the dtype of the arithmetic."""
    optional_state: ClassVar[tuple[str, ...]] = ()
    """Entries of `entry_state` that may be missing."""
    statistics_kept: ClassVar[Mapping[str, str]] = MappingProxyType({"U": "matrix"})
    """Statistics between blocks: a "matrix", a "vector" or a "mask". Includes `U` if there are any."""
    further_state: ClassVar[tuple[str, ...]] = ()
    """State of other shapes, in the dtype of the arithmetic; may be missing."""
    counters: ClassVar[tuple[str, ...]] = ("step",)
    """State that counts steps: float32 on the CPU, as in torch."""
    default_blocks: ClassVar[tuple[str, str]] = ("element", "all")
    """Partition and coupling of a group that has no such options."""
    works_in_pieces: ClassVar[bool] = True
    """Whether large tensors are cut into pieces."""
    keeps_lists: ClassVar[bool] = False
    """Whether the lists of a step serve the next one too if nothing has changed."""
    has_kernels: ClassVar[bool] = False
    """Whether native kernels exist for this method, so that it takes fused=True."""
    takes_shards: ClassVar[bool] = True
    """Whether parameters may be sharded over processes."""
    leaves_plain: ClassVar[bool] = False
    """Whether tensors without proper blocks (norm gains, biases) take the diagonal step alone."""
    not_negative: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    switches: ClassVar[tuple[str, ...]] = ("maximize",)
    choices: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __init__(self, params: ParamsT | nn.Module, defaults: dict[str, Any]) -> None:
        self.skipped_steps = 0
        self.diagonal_fallbacks = 0
        self._layouts: list[Layout] = []  # one per group
        self._last: dict[int, tuple[Tensor, Tensor]] = {}  # the last step of a group along its blocks
        self._works: dict[int, Work] = {}  # of the last step, by group, if they can serve again
        self._exchange = Exchange()  # with the processes that have other shards of the parameters
        self._partition: By | None = defaults.get("partition")
        if callable(self._partition):  # groups and defaults must stay picklable
            defaults["partition"] = "custom"
        super().__init__([{"params": params}] if isinstance(params, nn.Module) else params, defaults)

    # ---------------------------------------------------------------- the four hooks

    def init_state(self, param: Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter before its first step, without statistics between blocks."""
        raise NotImplementedError

    def block_sums(self, work: Work) -> Tensor:
        """Pass 1: (rows, blocks of all pieces in order); row 0 sums the gradient. Changes nothing."""
        raise NotImplementedError

    def solve(self, work: Work) -> Any:
        """Update the statistics between blocks and return what `apply_` needs."""
        raise NotImplementedError

    def apply_(self, work: Work, solution: Any) -> None:
        """Pass 2: update state and parameters."""
        raise NotImplementedError

    def finish_(self, works: list[Work]) -> None:
        """What all groups do together after pass 2."""

    # ---------------------------------------------------------------- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: recomputes the gradients and returns the loss, which `step` then returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @_disable_dynamo
    def _step(self) -> None:
        """Both passes over all groups. Not traced by torch.compile: the check for bad gradients branches on values."""
        works: list[Work] = []
        failure: Exception | None = None
        try:
            works = [work for i in range(len(self.param_groups)) if (work := self.collect(i)) is not None]
            busy = [work for work in works if work.params or work.is_sharded]
            for work in busy:
                work.sums = self.block_sums(work)
        except Exception as error:
            if not self._is_sharded:
                raise
            works, busy, failure = [], [], error  # the other processes are waiting
        elsewhere = self._complete(busy, failure)
        if elsewhere or (not all(work.is_finite for work in busy) and not _all_finite(busy)):
            for work in busy:
                if work.group["nonfinite"] == "raise" and not finite_blocks(work.sums).all():
                    raise ValueError(_describe_nonfinite(work))
            self.skipped_steps += 1
            return
        for work in works:
            if work.counters:
                native.advance(work.counters)
                continue
            for i, state in work.states.items():
                self.state[work.tensors[i]] = state
            torch._foreach_add_([state["step"] for state in work.states.values()], 1)
        for work in busy:
            self.apply_(work, self.solve(work))
        self.finish_(busy)
        for work in busy:
            if self.keeps_lists and not work.is_sharded:
                self._keep(work)

    @property
    def _is_sharded(self) -> bool:
        return any(layout.is_sharded for layout in self._layouts)

    def num_rows(self, group: dict[str, Any]) -> int:
        """Rows of the sums of a group, whatever has a gradient: processes exchange sums of equal sizes."""
        raise NotImplementedError

    def exchange_dtype(self) -> torch.dtype:
        """Of the sums that processes exchange."""
        return torch.float64

    def requests(self, number: int, work: Work | None) -> list[Request]:
        """What else has to be added up over processes between the passes, of the same size in every step."""
        return []

    def _complete(self, busy: list[Work], failure: Exception | None = None) -> bool:
        """Put the sums of all pieces in place, and add up those of sharded tensors over processes.

        Raises on all processes if one has failed. Returns whether another one has a gradient that is not finite.
        """
        if not self._is_sharded:
            for work in busy:
                work.sums = assemble(work, work.sums)
            return False
        shares: list[tuple[Work | None, int, Request]] = []
        question = Question()
        if failure is None:
            try:
                shares, question = self._ask(busy)
            except Exception as error:
                failure = error
        raises, skips, *present = self._exchange.add_up(question, failure, self._process_groups)
        if any(0 < share < 1 for share in present):
            raise RuntimeError(
                f"{type(self).__name__}: a sharded parameter has a gradient on some of the processes only. Let all "
                "have one (of zeros, if need be), or none. Nothing was changed."
            )
        for owner, i, share in shares:
            if owner is not None:
                layout, sums = owner.layout, owner.sums
                blocks = slice(layout.starts[i], layout.starts[i] + layout.counts[i])
                sums[:, blocks] += share.value.view(len(sums), -1).to(sums)
        if raises and not question.votes[0]:
            raise ValueError("A gradient on another process is not finite. Nothing was changed.")
        return skips > 0

    def _process_groups(self) -> list[Any]:
        params = [param for group in self.param_groups for param in group["params"]]
        return list(dict.fromkeys(over for param in params for over in sharding.sides_of(param).both))

    def _ask(self, busy: list[Work]) -> tuple[list[tuple[Work | None, int, Request]], Question]:
        """What this process knows of every sharded tensor, and all of what it wants to have added up."""
        works = {work.number: work for work in busy}
        shares: list[tuple[Work | None, int, Request]] = []
        further: list[Request] = []
        about = []
        present = []
        for number, layout in enumerate(self._layouts):
            work, tensors = works.get(number), distinct(self.param_groups[number])
            rows = self.num_rows(self.param_groups[number] if work is None else work.group)
            own = {} if work is None else split_shards(work, rows)
            every = self.param_groups[number].get("refresh_every")
            about.append((layout.fingerprint, layout.coupling, rows, every) if layout.is_sharded else ())
            for i in layout.sharded:
                present.append(work is not None and i in work.states)
                nothing = torch.zeros(rows * layout.counts[i], dtype=torch.float64, device="cpu")
                shares.append((work, i, Request(own.get(i, nothing), sharding.sides_of(tensors[i]).both)))
            if layout.is_sharded:
                further += self.requests(number, work)
        bad = [work.group["nonfinite"] for work in busy if not finite_blocks(work.sums).all()]
        bad += [work.group["nonfinite"] for work, _, share in shares if work and not share.value.isfinite().all()]
        asked = [share for *_, share in shares] + further
        votes = ["raise" in bad, "skip" in bad, *present]
        return shares, Question(asked, about, self.exchange_dtype(), votes, self._training)

    def _training(self) -> list[Any]:
        """What has to be the same on all processes, though no exchange depends on it: names, options, steps taken."""
        found: list[Any] = []
        for group in (self.param_groups[number] for number, layout in enumerate(self._layouts) if layout.is_sharded):
            options = [(name, group.get(name)) for name in sorted(self.defaults.keys() - {"foreach", "fused"})]
            plain = [(name, float(value) if isinstance(value, Tensor) else value) for name, value in options]
            states = [self.state.get(param, {}) for param in distinct(group)]
            steps = [[int(state[name]) for name in self.counters if name in state] for state in states]
            found.append((given_names(group), plain, steps))
        return found

    def collect(self, number: int, at_rest: bool = False) -> Work | None:
        """The lists of one group; None if no parameter has a gradient. `at_rest`: all that have state, no gradients."""
        group = self.param_groups[number]
        kept = None if at_rest else self._works.pop(number, None)
        if kept is not None and kept.layout is self._layouts[number] and kept.serves_again(group, self.state):
            return kept
        kept = None  # with all that it holds
        tensors = distinct(group)
        layout = self._layout(number, tensors)
        states = {
            i: self._state_of(param, group)
            for i, param in enumerate(tensors)
            if ("step" in self.state.get(param, {}) if at_rest else param.grad is not None)
        }
        if not states:
            return None
        work = Work(number, group, layout, tensors, states, moments={key: [] for key in self.entry_state})
        if not at_rest:  # once: it may take a collective
            work.gradients = {i: local_gradient(tensors[i]) for i in layout.sharded if i in states}
        others: dict[int, State] = {}  # without a gradient, in blocks where another parameter has one
        if layout.is_shared and len(states) < len(tensors):
            touched = {layout.starts[i] for i in states if layout.counts[i]}
            others = {
                i: self._state_of(tensors[i], group)
                for i in layout.component_of
                if i not in states and layout.starts[i] in touched
            }
        self._refuse_gradients(work, others)
        device = tensors[next(iter(states))].device
        pieces = self.pieces(work, device)
        counts = {i: int(state["step"]) for i, state in {**states, **others}.items()}
        taking_part = {**states, **others}
        for piece in pieces:
            state = taking_part.get(piece.tensor)
            if state is None:
                continue
            param = local(tensors[piece.tensor])
            grad = None if at_rest or piece.tensor in others else work.gradient(piece.tensor)
            rows = slice(None) if piece.rows is None else slice(*piece.rows)
            whole = piece.rows is None
            work.params.append(param if whole else param[rows])
            work.grads.append(grad if whole or grad is None else grad[rows])
            for key, values in work.moments.items():
                value = local(state[key]) if key in state else None
                values.append(value if whole or value is None else value[rows])
            work.indices.append(piece.tensor)
            work.steps.append(counts[piece.tensor] + (grad is not None))
            work.cuts.append(piece.cut)
            work.blocks.append(piece.blocks)
            work.pieces.append(piece)
        missing = any(i not in taking_part for i in range(len(tensors)) if layout.counts[i])
        if missing and (work.params or work.is_sharded):
            work.present = torch.zeros(layout.num_blocks, dtype=torch.bool, device="cpu")
            for i in taking_part:
                work.present[layout.starts[i] : layout.starts[i] + layout.counts[i]] = True
            work.present = work.present.to(home_of(device), non_blocking=True)
        work.in_order = not missing and not work.is_sharded and pieces.is_in_order
        return work

    def pieces(self, work: Work, device: torch.device) -> Pieces:
        """The pieces of the tensors that a step processes."""
        return work.layout.split if self.works_in_pieces and device.type == "cpu" else work.layout.whole

    def _keep(self, work: Work) -> None:
        """Let the next step have these lists, but not the gradients: whoever frees those frees their memory."""
        if work.watch is None:
            if any(grad is None for grad in work.grads) or not Watch.can_see(work.tensors, work.states):
                return
            work.watch = Watch(work.tensors, work.states)
            work.ways = work.group.get("foreach"), work.group.get("fused")
            work.is_whole = all(piece.rows is None for piece in work.pieces)
            order = {i: place for place, i in enumerate(work.states)}
            work.places = [order[i] for i in work.indices]
            counters = [state["step"] for state in work.states.values()]
            if native.is_available() and all(x.dtype == torch.float32 and x.is_cpu for x in counters):
                work.counters = [x.data_ptr() for x in counters]
        work.grads = []
        self._works[work.number] = work

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter, or a new one, which `_step` stores once all gradients are known to be finite."""
        state: State = self.state.get(param, {})
        if "step" not in state:
            return {**state, **self.init_state(param, group)}
        if any(key not in state for key in self.entry_state if key not in self.optional_state):
            state = {**self.init_state(param, group), **state}  # somebody deleted a moment: it starts over
        held = [key for key in (*self.entry_state, *self.further_state) if key in state]
        if any(state[key].dtype != param.dtype for key in held):  # half precision, or the model changed dtype
            dtype = arithmetic(param.dtype)
            if any(state[key].dtype != dtype for key in held):
                return {**state, **{key: state[key].to(dtype) for key in held}}
        return state

    def _refuse_gradients(self, work: Work, others: Mapping[int, State]) -> None:
        for i in work.states:
            grad = work.tensors[i].grad
            if grad is not None and grad.layout != torch.strided:
                name = shown_names(work.group)[i]
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients. {name} has one. Make its layer with "
                    "sparse=False."
                )
        devices = sorted({str(work.tensors[i].device) for i in (*work.states, *others)})
        if len(devices) > 1:
            raise RuntimeError(
                f"{type(self).__name__} processes the parameters of a group together: they must be on one device. "
                f"Got {' and '.join(devices)}. Put them into separate parameter groups."
            )

    # ---------------------------------------------------------------- statistics between blocks

    def statistics(
        self, work: Work, names: Sequence[str], initial: float = 0.0, keep: bool = True
    ) -> Iterator[tuple[Component, dict[str, Tensor]]]:
        """Yield the named statistics of every component that takes part; changes in place are stored afterwards.

        Blocks that are new start with the diagonal of U and the energy of H = `initial` I, and with 0 in all else.
        What is not named is not kept up, and is dropped. With `keep=False` nothing changes.
        """
        layout, kinds = work.layout, {name: self.statistics_kept[name] for name in names}
        for component in taking_part(layout, work.states, work.sums.device):
            known = {i: self.state.get(work.tensors[i], {}) for i in component.members}
            begun = {"blocks", *names} - {"root", "root_of"}  # without a root, one is due
            held = {i: state for i, state in known.items() if begun <= state.keys()}
            gathered = gather(layout, component, kinds, held, initial, work.sums)
            yield component, gathered
            if keep:
                scatter(layout, component, gathered, held, work.states)
                for state in known.values():
                    for name in self.statistics_kept.keys() & state.keys() - kinds.keys():
                        del state[name]

    def count_fallback(self, num_blocks: int) -> None:
        """Count a failed eigendecomposition; warn about the first."""
        if not self.diagonal_fallbacks:
            warnings.warn(
                f"{type(self).__name__}: an eigendecomposition of {num_blocks} blocks failed twice; the diagonal step "
                "is taken instead. `diagonal_fallbacks` counts these steps. A smaller lr usually helps.",
                stacklevel=6,
            )
        self.diagonal_fallbacks += 1

    def matrices(self, work: Work) -> Iterator[tuple[Component, Tensor]]:
        """A of every component, outside a step, for `block_statistics`."""
        raise NotImplementedError

    def measures_diagonal(self, group: dict[str, Any]) -> bool:
        """Whether A_ii is the energy of a block along its mean, in units of the gradient's own size."""
        return False

    @torch.no_grad()
    def block_statistics(self) -> list[BlockStatistics]:
        """What the optimizer knows about the dependency between blocks: one entry per parameter group and matrix.

        Costs one pass over the state and the eigenvalues of every A, and only when called. If parameters are
        sharded, all processes call it.
        """
        found = []
        for number in range(len(self.param_groups)):
            if not any("U" in self.state.get(param, {}) for param in self.param_groups[number]["params"]):
                continue
            work = self.collect(number, at_rest=True)
            if work is None or not (work.params or work.is_sharded):
                continue
            layout = work.layout
            common, change = self._last.get(number, (None, None))
            for component, A in self.matrices(work):
                blocks = torch.arange(layout.num_blocks)[component.blocks]
                found.append(
                    BlockStatistics(
                        group=number,
                        coupling=component.name,
                        names=[layout.names[i] for i in blocks.tolist()],
                        parameters=[layout.owners[i] for i in blocks.tolist()],
                        sizes=layout.sizes[blocks],
                        A=A,
                        eigenvalues=eigenvalues_of(A),
                        is_normalised=self.measures_diagonal(work.group),
                        common=None if common is None else common[component.blocks].clone(),
                        change=None if change is None else change[component.blocks].clone(),
                    )
                )
        return found

    # ---------------------------------------------------------------- groups and their options

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise if an option of a group is out of range."""
        owner = type(self).__name__
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name in self.not_negative:
            value = float(lr) if name == "lr" and isinstance(lr, Tensor) else group[name]
            require_number(value, name, owner)
        self.check_kinds(group)

    def check_kinds(self, group: dict[str, Any]) -> None:
        """Raise if no step can use an option. Ranges are not checked: torch's schedules exceed them."""
        owner = type(self).__name__
        for name in self.switches:
            require(isinstance(group[name], bool), name, owner, "True or False", group[name], TypeError)
        for name, allowed in {"coupling": COUPLINGS, "nonfinite": ("raise", "skip"), **self.choices}.items():
            if name in group:
                require_choice(group[name], allowed, name, owner)
        if "refresh_every" in group:
            k = group["refresh_every"]
            whole = isinstance(k, int) and not isinstance(k, bool)
            require(whole and k >= 1, "refresh_every", owner, "a whole number >= 1", k)
        for name in ("foreach", "fused"):
            good = group.get(name) is None or isinstance(group[name], bool)
            require(good, name, owner, "True, False or None", group.get(name), TypeError)
        if group.get("fused"):
            if group.get("foreach"):
                raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
            if not self.has_kernels:
                raise RuntimeError(f"{owner} has no native kernels, so it does not take fused=True. Take fused=None.")
            if not native.is_available():
                raise RuntimeError(f"{owner}(fused=True) needs native kernels. {native.MISSING}, or take fused=None.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, or a module, optionally with its own partition, coupling and other options."""
        outputs: dict[Tensor, int | Tensor] = {}
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if isinstance(params, nn.Module):
            outputs = outputs_of(params)
            param_group = {**param_group, "params": list(params.named_parameters())}
        elif isinstance(params, NamedParameters):
            outputs = params.outputs
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_group(group)
            self._refuse_parameters(group)
            tensors = distinct(group)
            by, _ = self._blocks_of(group)
            if by == "custom" and self._partition is not None:
                by = self._partition
            self._layouts.append(self._make_layout(group, tensors, by, [outputs.get(param, 0) for param in tensors]))
            self._layouts[-1].group = len(self._layouts) - 1
            self._adopt_layout(group, self._layouts[-1], tensors)
        except Exception:
            self.param_groups.pop()
            raise

    def _refuse_parameters(self, group: dict[str, Any]) -> None:
        owner = type(self).__name__
        for i, param in enumerate(group["params"]):
            if not param.is_floating_point() or param.layout != torch.strided:
                kind = "sparse" if param.layout != torch.strided else str(param.dtype).removeprefix("torch.")
                raise ValueError(f"{owner} does not support {kind} parameters. Parameter {i} is one.")
            if getattr(param, "_fsdp_flattened", False):
                raise ValueError(
                    f"{owner} cannot see the blocks of parameters that FullyShardedDataParallel has flattened: "
                    f"parameter {i} is one. Use fully_shard, which shards them one by one, or DistributedDataParallel."
                )
            if not sharding.is_distributed(param):
                continue
            if not self.takes_shards:
                raise ValueError(
                    f"{owner} needs all entries of all gradients in one place, so it does not take sharded parameters "
                    f"(DTensor). Parameter {i} is one. Use AdaGradBMA, or DistributedDataParallel."
                )
            if any(placement.is_partial() for placement in param.placements):
                raise ValueError(
                    f"{owner} does not take a parameter that is a sum over processes. Parameter {i} is one."
                )

    def _blocks_of(self, group: dict[str, Any]) -> tuple[By, str]:
        """The partition and the coupling of a group."""
        partition, coupling = self.default_blocks
        return group.get("partition", partition), group.get("coupling", coupling)

    def _make_layout(
        self, group: dict[str, Any], tensors: list[Tensor], by: By, outputs: Sequence[int | Tensor]
    ) -> Layout:
        """The blocks of a group. Without 'partition' and 'coupling' (AdaGradFull): single entries, all coupled."""
        owner, names = type(self).__name__, given_names(group)
        if by == "custom":
            raise ValueError(
                f"{owner} has no callable to cut these parameters with: copies do not keep it, and parameters of other "
                "shapes need it again. Pass 'partition', or construct a new optimizer."
            )
        known = callable(by) or by in BY
        require(known, "partition", owner, f"a callable or one of {', '.join(map(repr, BY))}", by)
        # Whatever the default device is: a layout is looked up, never computed with.
        with torch.device("cpu"):
            cuts = [
                cut(name, i, param, by, output)
                for i, (name, param, output) in enumerate(zip(names, tensors, outputs, strict=True))
            ]
            return Layout(
                cuts,
                "custom" if callable(by) else by,
                self._blocks_of(group)[1],
                owner,
                named=all(names),
                leave_plain=self.leaves_plain,
                outputs=outputs,
                boxes=[sharding.box_of(param) for param in tensors],
                decompositions=self.decompositions(group),
                max_bytes=group.get("max_bytes", MATRIX_LIMIT),
            )

    @staticmethod
    def _adopt_layout(group: dict[str, Any], layout: Layout, tensors: list[Tensor]) -> None:
        if "partition" in group:
            group["partition"] = layout.partition  # a name: groups hold plain values only
        group["blocks"] = layout.fingerprint
        layout.ids = [id(param) for param in tensors]
        layout.placements = [sharding.placement_of(param) for param in tensors]

    def decompositions(self, group: dict[str, Any]) -> float:
        """Eigendecompositions per step and matrix, on average."""
        return 1 / group.get("refresh_every", 1) if group.get("correction", True) else 0.0

    def _layout(self, number: int, tensors: list[Tensor]) -> Layout:
        """The layout of a group, rebuilt if parameters or options have changed."""
        group, layout = self.param_groups[number], self._layouts[number]
        wanted = self._blocks_of(group)
        placed = layout.placements == [sharding.placement_of(param) for param in tensors]
        same = layout.shapes == [param.shape for param in tensors] and (layout.partition, layout.coupling) == wanted
        same &= placed
        if same and layout.ids == [id(param) for param in tensors]:
            return layout
        if len(tensors) != len(layout.shapes):
            raise ValueError(
                f"A parameter group of {type(self).__name__} had {len(layout.tensors)} parameters when added, and "
                f"has {len(tensors)} now. Add new parameters with add_param_group."
            )
        self.check_kinds(group)
        self._refuse_parameters(group)
        shapes = [param.shape for param in tensors]
        if same:  # other tensors, or another order of the same
            pass
        elif placed and shapes == layout.shapes and layout.partition == wanted[0]:
            layout = layout.coupled(wanted[1], type(self).__name__, self.decompositions(group))
        else:
            outputs = [o if s == t else 0 for o, s, t in zip(layout.outputs, layout.shapes, shapes, strict=True)]
            layout = self._make_layout(group, tensors, wanted[0], outputs)
        states = {i: self.state[param] for i, param in enumerate(tensors) if param in self.state}
        check_places(layout, states, shown_names(group), "Delete 'U' from the states of the group to start over.")
        self._layouts[number], layout.group = layout, number
        self._adopt_layout(group, layout, tensors)
        self._last.pop(number, None)
        arrange(layout, states, self.statistics_kept)
        return layout

    # ---------------------------------------------------------------- saving and loading

    def __getstate__(self) -> dict[str, Any]:
        own = ("skipped_steps", "diagonal_fallbacks", "_layouts")
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; we have no such option
        self.__dict__.setdefault("_partition", None)
        self._last, self._works = {}, {}
        self._exchange = self.__dict__.get("_exchange", Exchange())
        self._exchange.doubt()
        for param in (param for group in self.param_groups for param in group["params"]):
            if param in self.state:
                self.state[param] = without_gaps(self.state[param])
            kept = self.state.get(param, {})
            if "step" in kept and not isinstance(kept["step"], Tensor):
                kept["step"] = torch.tensor(float(kept["step"]), dtype=torch.float32)

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` bit by bit; raise if the checkpoint has another partition.

        torch casts every state tensor but "step" to the dtype of its parameter. Here moments get the dtype of the
        arithmetic and statistics between blocks stay float64. Everything is copied, so training never changes the
        loaded dict. States loaded by name, in a different order of parameters, are reordered. Options missing from the
        dict keep their current values.
        """
        incoming: dict[str, Any] = {}
        layouts: list[Layout] = []

        def complete(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            groups = final["param_groups"]
            sizes = [len(group["params"]) for group in groups]
            if sizes == [len(group["params"]) for group in self.param_groups]:  # else torch raises
                groups = [self._completed(i, saved) for i, saved in enumerate(groups)]
                layouts.extend(self._check_checkpoint(i, group, final["state"]) for i, group in enumerate(groups))
            incoming.update(final)
            return {**final, "param_groups": groups}

        def adopt(_: Optimizer) -> None:
            self._layouts = layouts
            for number, saved in enumerate(incoming["param_groups"]):
                group = self.param_groups[number]
                for param, key in zip(group["params"], saved["params"], strict=True):
                    for name, value in incoming["state"].get(key, {}).items():
                        if isinstance(value, Tensor):
                            self.state[param][name] = self._adopted(param, name, value)
                states = {i: self.state[param] for i, param in enumerate(distinct(group)) if param in self.state}
                arrange(layouts[number], states, self.statistics_kept)
                layouts[number].ids = [id(param) for param in distinct(group)]

        # After the user's hooks that modify the dict, and before those that inspect the result.
        handles = [
            self.register_load_state_dict_pre_hook(complete),
            self.register_load_state_dict_post_hook(adopt, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _adopted(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        """A copy of a loaded tensor, with the dtype and device that a step expects."""
        value = value.detach()
        if name in self.counters:
            return value.to("cpu", torch.float32, copy=True)
        if name in (*self.entry_state, *self.further_state):
            placed = sharding.placed_like(param, value, self.sharded_dims(name, value))
            return placed.to(param.device, arithmetic(param.dtype), copy=True)
        if self.statistics_kept.get(name) in ("matrix", "vector"):
            return value.to(home_of(param.device), torch.float64, copy=True)
        return value.to("cpu" if name in ("blocks", *self.statistics_kept) else param.device, copy=True)

    def sharded_dims(self, name: str, value: Tensor) -> list[int]:
        """The dims along which a state tensor is sharded if its parameter is."""
        return list(range(value.ndim))

    def _completed(self, number: int, saved: dict[str, Any]) -> dict[str, Any]:
        """A saved group with missing options filled in; raise if it does not fit."""
        group, owner = self.param_groups[number], type(self).__name__
        full = {**{key: value for key, value in group.items() if key != "params"}, **saved}
        # How a step is computed, and what its partition is called here: neither is part of the training.
        full.update({key: group[key] for key in ("foreach", "fused", "partition") if key in group})
        lr = full["lr"]
        require(isinstance(lr, int | float | Tensor) and bool(lr == lr), "lr", owner, "a number", lr)
        self.check_kinds(full)
        if full["blocks"] != group["blocks"] and "checksum" in str(full["blocks"]):
            raise ValueError(_FROM_BEFORE.format(owner))
        return full

    def _check_checkpoint(self, number: int, group: dict[str, Any], saved: Mapping[Any, State]) -> Layout:
        """The layout for a group about to be loaded; raise if its states do not fit."""
        owner, current = type(self).__name__, self.param_groups[number]
        places = {key: i for i, key in enumerate(dict.fromkeys(group["params"]))}
        tensors = distinct(current)
        states = {i: without_gaps(saved[key]) for key, i in places.items() if key in saved and i < len(tensors)}
        for i, state in states.items():
            missing = [key for key in ("step", *self.entry_state) if key not in state] if "step" in state else []
            missing = [key for key in missing if key not in self.optional_state]
            if missing:
                raise ValueError(
                    f"The checkpoint is not one of {owner}: the state of parameter {i} lacks "
                    f"{', '.join(missing)}; it has {', '.join(sorted(state))}."
                )
            for key in self.entry_state:
                if isinstance(state.get(key), Tensor) and state[key].shape != tensors[i].shape:
                    raise ValueError(
                        f"The checkpoint has {key} of shape {tuple(state[key].shape)} for {shown_names(current)[i]}, "
                        f"whose shape is {tuple(tensors[i].shape)}. Load it with the same model, its parameters in the "
                        "same order."
                    )
        if group["blocks"] != current["blocks"]:
            if "partition" in current:
                kind, way_out = "another partition of", f"Construct {owner} with that partition"
            else:
                kind, way_out = "other blocks for", "Load it with the model and the optimizer that it was made with"
            raise ValueError(
                f"The checkpoint was made with {kind} parameter group {number}: it has {group['blocks']}, "
                f"this optimizer {current['blocks']}. {way_out}, or start with fresh state."
            )
        if any("U" in state and "blocks" not in state for state in states.values()):
            raise ValueError(_FROM_BEFORE.format(owner))
        layout = self._layouts[number]
        _, coupling = self._blocks_of(group)
        if coupling != layout.coupling:
            layout = layout.coupled(coupling, owner)
        remedy = f"Construct {owner} with the model it was saved from, or delete 'U' from the saved states."
        check_places(layout, states, shown_names(current), remedy)
        return layout


_FROM_BEFORE = (
    "The checkpoint was made before {0} kept its statistics between blocks in one place. Delete 'U', 'root', 'weight' "
    "and 'variance' from its states and 'blocks' from its param_groups: the rest loads, and the statistics start over."
)


def distinct(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group, each once: torch only warns about duplicates."""
    return list(dict.fromkeys(group["params"]))


def given_names(group: dict[str, Any]) -> list[str]:
    """The names of the distinct parameters of a group, '' if unnamed."""
    return list(dict(zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True)).values())


def shown_names(group: dict[str, Any]) -> list[str]:
    """What to call the parameters of a group in messages."""
    return [
        f"'{name}'" if name else f"parameter {i} {list(param.shape)}"
        for i, (name, param) in enumerate(zip(given_names(group), distinct(group), strict=True))
    ]


def finite_blocks(sums: Tensor) -> Tensor:
    """Which blocks have finite sums, and gradient sums whose squares do not overflow in U, (L,)."""
    return sums.isfinite().all(0) & sums[0].square().isfinite()


def _all_finite(works: list[Work]) -> bool:
    """Whether every sum of every group is finite. Only here does a step wait for an accelerator."""
    flags = [finite_blocks(work.sums).all() for work in works]
    return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()) if flags else True


def assemble(work: Work, columns: Tensor) -> Tensor:
    """(rows, L): the sums of every piece, placed at its blocks. Pieces that share blocks add up."""
    if work.in_order:
        return columns
    sums = columns.new_zeros(len(columns), work.layout.num_blocks)
    index = torch.cat([torch.arange(b.start, b.stop, device=columns.device) for b in work.blocks])
    return sums.index_add_(1, index, columns)


def split_shards(work: Work, rows: int) -> dict[int, Tensor]:
    """Keep the sums of tensors that are whole here; return what each sharded tensor adds to its blocks.

    That is (rows, blocks of the tensor), flattened.
    """
    layout, columns = work.layout, work.sums
    work.sums = columns.new_zeros(rows, layout.num_blocks)
    shares = {i: columns.new_zeros(rows * layout.counts[i]) for i in layout.sharded}
    start = 0
    for i, blocks in zip(work.indices, work.blocks, strict=True):
        own = columns[:, start : (start := start + blocks.stop - blocks.start)]
        if i in shares:
            share = shares[i].view(rows, -1)
            blocks = slice(blocks.start - layout.starts[i], blocks.stop - layout.starts[i])
            share[: len(own), blocks] += own
        else:
            work.sums[: len(own), blocks] += own
    return shares


def _describe_nonfinite(work: Work) -> str:
    names = shown_names(work.group)
    gradients = [(f"gradient of {names[i]}", work.gradient(i)) for i in work.states]
    for what, tensor in [*gradients, *((f"parameter {names[i]}", local(work.tensors[i])) for i in work.states)]:
        if tensor is not None and not tensor.isfinite().all():
            nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            found = f"The {what} has {nan} NaN and {inf} infinite of {tensor.numel()} entries"
            break
    else:
        i = int((~finite_blocks(work.sums)).nonzero()[0])
        if work.is_sharded:
            return (
                f"The gradient of block {work.layout.names[i]} on another process is not finite, or the sums over it "
                "overflow. Nothing was changed."
            )
        found = f"The sums over block {work.layout.names[i]} overflow, though every gradient is finite"
    return f"{found}. Nothing was changed. nonfinite='skip' skips such steps and counts them."
