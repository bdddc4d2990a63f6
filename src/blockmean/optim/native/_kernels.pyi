"""The extension module, see module.cpp. Addresses are those of tensors that the caller keeps alive."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import CapsuleType

instructions: str

def table(numbers: list[int]) -> CapsuleType: ...
def block_sums(
    table: CapsuleType,
    rule: tuple[int | float, ...],
    grads: list[int],
    steps: list[int],
    out: int,
    stride: int,
    local: bool,
    threads: int,
) -> tuple[bool, bool]: ...
def apply_(
    table: CapsuleType,
    rule: tuple[int | float, ...],
    grads: list[int],
    steps: list[int],
    c: int,
    kappa: int,
    threads: int,
) -> None: ...
def solve_and_apply_(
    table: CapsuleType,
    rule: tuple[int | float, ...],
    solver: CapsuleType,
    form: tuple[int | float, ...],
    vectors: tuple[int, ...],
    threads: int,
) -> bool: ...
def solver(blocks: int, numbers: list[int]) -> CapsuleType: ...
def accumulate(solver: CapsuleType, form: tuple[int | float, ...], vectors: tuple[int, ...], A: int) -> None: ...
def times_root(solver: CapsuleType, A: int, n: int, floor: float, b: int, out: int) -> bool: ...
def correct(solver: CapsuleType, form: tuple[int | float, ...], vectors: tuple[int, ...]) -> None: ...
def matrices(numbers: list[int]) -> CapsuleType: ...
def anova_sums(matrices: CapsuleType, grads: list[int], out: int, threads: int) -> bool: ...
def anova_apply_(
    matrices: CapsuleType, squares: int, steps: list[tuple[float, ...]], which: list[int], threads: int
) -> list[int]: ...
def read_steps(addresses: list[int]) -> list[int]: ...
def advance(addresses: list[int]) -> None: ...
def unchanged(
    params: list[Tensor],
    states: Mapping[Tensor, dict[str, Any]],
    seen: list[Tensor],
    own: list[dict[str, Any] | None],
    things: list[Tensor],
    addresses: list[int | None],
    sizes: list[int | None],
    kinds: list[tuple[Any, ...]],
    gradients: list[tuple[Any, ...]],
    /,
) -> list[Tensor] | None: ...
