"""Anova's steady step in NumPy, float64 and dense: every part of M is formed and divided by its own root."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

PIECES = {
    "exp_avg": ("M",),
    "unit_means": ("U", "X", "MV", "v_E"),
    "input_means": ("V", "Y", "UM"),
    "grand_means": ("K_m", "v_K", "v_R", "v_L", "variance", "rest_variance", "factor", "w1", "wm", "wE"),
}


@dataclass
class Rates:
    """The numbers of a step."""

    lr: float = 1e-2
    beta1: float = 0.9
    mean_beta: float = 0.95
    beta2: float = 0.999
    weight_decay: float = 0.0
    eps: float = 1e-8
    sign: float = 1.0


@dataclass
class Matrix:
    """A weight and the state of its means, in the middle of a run."""

    units: int
    inputs: int
    k: int
    q: int
    rng: np.random.Generator
    zero: bool = False  # never had a gradient
    state: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        O, I, k, q, rng = self.units, self.inputs, self.k, self.q, self.rng
        U, V = np.linalg.qr(rng.standard_normal((O, k)))[0], np.linalg.qr(rng.standard_normal((I, q)))[0]
        M = rng.standard_normal((O, I)) * 0.1
        self.param = rng.standard_normal((O, I))
        self.state = {
            "M": M, "U": U, "X": rng.standard_normal((O, k)), "v_E": rng.random(O) * 0.01, "V": V,
            "Y": rng.standard_normal((I, q)), "v_K": rng.random((k, q)), "v_R": rng.random(q) * 0.1,
            "v_L": rng.random(k) * 0.1, "variance": np.array(0.1), "rest_variance": np.array(0.05),
            "factor": np.array(2.0), "w1": np.array(0.5), "wm": np.array(0.3), "wE": np.array(0.2),
        }  # fmt: skip
        if self.zero:
            kept = {"U", "V", "factor"}
            self.state = {name: x if name in kept else 0 * x for name, x in self.state.items()}
        self.state = {name: np.asarray(x, np.float32).astype(np.float64) for name, x in self.state.items()}
        M, U, V = (self.state[name] for name in ("M", "U", "V"))
        self.state |= {"MV": M @ V, "UM": U.T @ M, "K_m": U.T @ M @ V}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as the optimizer keeps it."""
        s = self.state | {"V": self.state["V"].T, "Y": self.state["Y"].T, "v_E": self.state["v_E"][:, None]}
        joined = {
            "exp_avg": s["M"],
            "unit_means": np.concatenate([s[name] for name in PIECES["unit_means"]], 1),
            "input_means": np.concatenate([s[name] for name in PIECES["input_means"]], 0),
            "grand_means": np.concatenate([s[name].reshape(-1) for name in PIECES["grand_means"]]),
        }
        return {name: torch.tensor(np.ascontiguousarray(x), dtype=torch.float32) for name, x in joined.items()}

    def pieces(self, tensors: dict[str, torch.Tensor]) -> dict[str, Array]:
        """The opposite of `tensors`."""
        found = {"M": tensors["exp_avg"].numpy()}
        for name, axis in (("unit_means", 1), ("input_means", 0), ("grand_means", 0)):
            x, at = tensors[name].numpy(), 0
            for piece in PIECES[name]:
                shape = self.state[piece].T.shape if piece in "VY" else self.state[piece].shape
                length = (*shape, 1)[axis] if name != "grand_means" else int(np.prod(shape))
                found[piece] = np.take(x, range(at, at + length), axis).reshape(shape)
                at += length
            assert at == x.shape[axis]
        return found | {"V": found["V"].T, "Y": found["Y"].T}

    def step(self, grad: Array, rates: Rates) -> float:
        """One step; ‖G‖²."""
        s, O, I, G = self.state, self.units, self.inputs, rates.sign * grad
        U, V = s["U"], s["V"]
        beta1, mean_beta, beta2 = (float(np.float32(1 - b)) for b in (rates.beta1, rates.mean_beta, rates.beta2))

        def average(name: str, value: Array | float, weight: float) -> None:
            s[name] = s[name] + weight * (np.asarray(value) - s[name])

        for name, weight in (("w1", beta1), ("wm", mean_beta), ("wE", beta2)):
            average(name, 1.0, weight)
        GV, UG = G @ V, U.T @ G
        K, rows, total = U.T @ GV, (G**2).sum(1), (G**2).sum()
        R, L = GV - U @ K, UG - K @ V.T
        squares_R, LL = (R**2).sum(0), L @ L.T
        without_V = total - (K**2).sum() - squares_R.sum()
        rest = max(without_V - np.trace(LL), 0.0)
        share = min(max(rest / without_V, 0.0), 1.0) if without_V else 0.0
        f = rows - (GV**2).sum(1)
        e = np.maximum.reduce([abs(f - ((U @ LL) * U).sum(1)), share * f, 2.0**-18 * rows])
        noise = 2.0**-19 * (total + s["v_K"].sum() + O * s["v_R"].sum() + I * s["v_L"].sum()) ** 0.5
        for name, value in (("M", G), ("MV", GV), ("UM", UG), ("K_m", K)):
            average(name, value, beta1)
        for name, value in (("v_K", K**2), ("v_R", squares_R / O), ("v_L", np.diag(LL) / I)):
            average(name, value, mean_beta)
        for name, value in (("v_E", e / I), ("variance", total / (O * I)), ("rest_variance", rest / (O * I))):
            average(name, value, beta2)
        average("X", GV @ K.T, 1 - 0.95)
        average("Y", UG.T @ K, 1 - 0.95)

        rK, rR, rL, rE = (
            np.maximum(np.sqrt(s[name] / s[weight]) + rates.eps + noise / size**0.5, 2.0**-63)
            for name, weight, size in (("v_K", "wm", 1), ("v_R", "wm", O), ("v_L", "wm", I), ("v_E", "wE", O * I))
        )
        M, MV, UM, K_m = s["M"], s["MV"], s["UM"], s["K_m"]
        delta = ((MV - U @ K_m) / rR) @ V.T + (U / rL) @ (UM - K_m @ V.T)
        delta += (M - MV @ V.T - U @ UM + U @ K_m @ V.T) / rE[:, None]
        c = min(
            max(float(s["factor"]), 0.7),
            max(min((3e-2 / max(rates.lr, 7.5e-5)) ** 0.5, 7e-3 / max(rates.lr, 7.5e-5)), 0.7),
        )
        sigma = np.sqrt(s["variance"] / s["wE"]) + rates.eps
        delta = c * delta + U @ (np.maximum(c / rK, np.minimum((K_m / rK / s["w1"]) ** 2, 1) / sigma) * K_m) @ V.T
        self.param = (1 - rates.lr * rates.weight_decay) * self.param - rates.lr / s["w1"] * delta
        return float(total)
