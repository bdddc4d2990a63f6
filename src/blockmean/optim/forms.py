"""The corrections of AdaGrad-BMA and Adam-BMA as data, and the recurrences that they correct.

Every form multiplies the diagonal step of the entries of block i by κ_i = λ_i^-½ and adds w c_i. c solves one small
problem between blocks:

    A = U / (n nᵀ)  (its diagonal kept, or set to 1)        c = N [A^-½ − diag κ] N b,   N = diag(scale)

    form         n_i              b_i              w           scale_i    diagonal of A   λ_i
    none         –                –                –           –          –               –       the diagonal method
    paper        Σ z              Σ g              z^-½        s_i^-½     1               1       Algorithm 1 as printed
    consistent   Σ z              Σ z^-½ g         z^-½        s_i^-½     1               1       Z^-½ F^-½ Z^-½
    weighted     √(Σ_τ Σ g²)      Σ ζ z^-½ m̂       ζ z^-½      ‖ζ^i‖⁻¹    kept            1       weighted block mean
    balanced     √(Σ_τ Σ g²)      Σ ζ z^-½ m̂       ζ z^-½      ‖ζ^i‖⁻¹    kept            below   the same, trace kept

ζ is the root of the accumulated squares, and z is the same with ε. For "weighted" and "balanced", U and the squares
inside n come from the same steps, so A is correct even if the accumulator has a longer history than U. "balanced" uses
λ_i = (s_i − A_ii) / (s_i − 1) from Proposition 1 (A_ii at least 1, λ_i at least `SMALLEST_LAMBDA`): the rest of a block
gains what its mean loses.
"""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """One correction: a row of the table above."""

    corrects: bool = True
    is_weighted: bool = False  # weights entries by their own scale ζ, blocks by the squares of their gradients
    takes_raw_sums: bool = False  # b is Σ g, although the algorithm has already scaled the gradient
    keeps_diagonal: bool = False
    keeps_trace: bool = False  # uses λ of Proposition 1 instead of 1
    floor: float = 1.0  # default for the smallest eigenvalue of A


FORMS = {
    "none": Form(corrects=False),
    "paper": Form(takes_raw_sums=True, floor=0.1),
    "consistent": Form(floor=0.1),
    "weighted": Form(is_weighted=True, keeps_diagonal=True),
    "balanced": Form(is_weighted=True, keeps_diagonal=True, keeps_trace=True),
}

SMALLEST_LAMBDA = 0.1
"""If a block's gradient is nearly all mean, little is known about the rest: its step grows by 1/√0.1 at most."""


class Rule(NamedTuple):
    """All that a step needs to know about a method. State accumulates gradients as AdaGrad's sums or Adam's averages:

        AdaGrad   m = g                       r ← r + g²                    ζ = √r    z = √(r + ε)
        Adam      m ← β₁ m + (1 − β₁) g       r ← β₂ r + (1 − β₂) g²        ζ = √r̂    z = ζ + ε       m̂, r̂ unbiased

    AdaGrad adds weight decay to the gradient; Adam subtracts it from the parameters.
    """

    form: Form
    betas: tuple[float, float] | None  # None: AdaGrad
    eps: float
    weight_decay: float
    maximize: bool
    lr: float
    lr_decay: float = 0.0
    initial: float = 0.0  # accumulators start at aI
    floor: float = 1.0  # smallest eigenvalue of A
    cap: float | None = None  # longest correction of a block, as a multiple of its diagonal step

    def plain(self) -> Rule:
        """The diagonal method."""
        return self._replace(form=FORMS["none"])
