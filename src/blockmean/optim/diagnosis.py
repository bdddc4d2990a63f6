"""Will the correction matter here? A look at what an optimizer has seen in its first steps."""

from __future__ import annotations

from dataclasses import dataclass

from blockmean._checks import require
from blockmean.optim._base import BlockMeanOptimizer

FEW_STEPS = 20
# Shares of gradient energy, set between tasks that were measured with and without the correction (docs/optimizers.md).
LITTLE, MUCH = 0.1, 0.2


@dataclass(frozen=True)
class Diagnosis:
    """How much of the gradient the entries of a block have in common.

    Measured in units of its own root mean square, the gradient of a block of s entries has energy s, of which A_ii lies
    along the one direction that all entries share. A diagonal method steps too far along it, by √A_ii. Where
    Σ A_ii / Σ s is small, that direction is a small part of training, whatever A_ii is.
    """

    share: float
    """Σ A_ii / Σ s over all blocks: between 0 and 1."""
    chance: float
    """What `share` would be for gradients without any common sign: one direction in s."""
    by_parameter: dict[str, float]
    """The same for the blocks of each parameter."""
    steps: int

    @property
    def matters(self) -> bool:
        """Whether the correction should make a difference that can be seen."""
        return self.share >= MUCH and self.share > 2 * self.chance

    def __str__(self) -> str:
        width = max(len(name) for name in self.by_parameter)
        lines = [f"{'parameter':{max(width, 9)}}  common share of the gradient"]
        lines += [f"{name:{max(width, 9)}}  {share:.1%}" for name, share in self.by_parameter.items()]
        lines.append(f"all together {self.share:.1%} after {self.steps} steps (by chance: {self.chance:.1%})")
        if self.steps < FEW_STEPS:
            lines.append(f"Too early to tell: take some {FEW_STEPS} to 50 steps first.")
        elif self.matters:
            lines.append("The correction should matter: compare it with correction=False at the best lr of each.")
        elif self.share >= LITTLE:
            lines.append("The correction may help a little.")
        else:
            lines.append("The correction has little to work on: the plain method is as good, and cheaper.")
        return "\n".join(lines)


def diagnose(optimizer: BlockMeanOptimizer) -> Diagnosis:
    """Foretell from some 50 steps of `AdamBMA`, or of `AdaGradBMA(variant="weighted")`, whether its correction matters.

    >>> import torch
    >>> from blockmean import AdamBMA
    >>> layer = torch.nn.Linear(50, 1)
    >>> optimizer = AdamBMA(layer.named_parameters())
    >>> for _ in range(30):
    ...     optimizer.zero_grad()
    ...     layer(torch.rand(8, 50)).square().mean().backward()  # inputs that are never negative
    ...     optimizer.step()
    >>> diagnose(optimizer).matters
    True
    """
    ours = isinstance(optimizer, BlockMeanOptimizer)
    require(ours, "optimizer", "diagnose", "AdamBMA or AdaGradBMA", type(optimizer).__name__, TypeError)
    energy: dict[str, float] = {}
    entries: dict[str, int] = {}
    blocks = 0
    for statistics in optimizer.block_statistics():
        if not optimizer._keeps_diagonal(optimizer.param_groups[statistics.group]) or not optimizer._is_normalised:
            raise ValueError(
                f"{type(optimizer).__name__} does not measure the diagonal of A in units of the gradient. "
                "Take some 50 steps with AdamBMA, or with AdaGradBMA(variant='weighted')."
            )
        blocks += len(statistics.names)
        prefix = f"group {statistics.group}: " if len(optimizer.param_groups) > 1 else ""
        rows = zip(statistics.parameters, statistics.diagonal.tolist(), statistics.sizes.tolist(), strict=True)
        for name, common, size in rows:
            parameter = prefix + name
            energy[parameter] = energy.get(parameter, 0.0) + common
            entries[parameter] = entries.get(parameter, 0) + size
    if not entries:
        raise ValueError("There is nothing to diagnose yet: take some steps with correction=True first.")
    total = sum(entries.values())
    return Diagnosis(
        share=sum(energy.values()) / total,
        chance=blocks / total,
        by_parameter={name: energy[name] / entries[name] for name in entries},
        steps=int(max(float(state["step"]) for state in optimizer.state.values() if "step" in state)),
    )
