"""The generalised Gauss-Newton matrix in block-mean form: A from L directional derivatives, λ from output space."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap

from blockmean._checks import require
from blockmean._linalg import to_float64
from blockmean.blocks import By
from blockmean.curvature._norm import Products
from blockmean.curvature._problem import Chunk, Data, LossFn, Params, Problem, Tensors, require_count, single
from blockmean.curvature._rows import RowSums, pull_back
from blockmean.curvature.report import Curvature, finish
from blockmean.partition import Partition

DERIVATIVE_BYTES = 2**27  # for derivatives of the outputs, L per sample
LARGEST_OUTPUT = 4096
"""The most outputs per sample: eigenvectors of larger loss Hessians take too much time and memory."""


def ggn(
    model: nn.Module,
    loss_fn: LossFn,
    data: Data,
    partition: Partition | By = "tensor",
    *,
    params: Params | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    num_probes: int | None = 16,
    norm_probes: int = 0,
    generator: torch.Generator | None = None,
) -> Curvature:
    """The block mean of G = (1/N) Σ_n J_nᵀ H_n J_n, J_n the Jacobian of the outputs, H_n the loss's Hessian in them.

    A = Rᵀ G R is exact: L derivatives of the outputs along the block indicators, T = J R, then A = Tᵀ H T.

    λ comes from output space. With H_n = Σ_c σ_c q_c q_cᵀ (C outputs), G is a sum of rows √|σ_c| J_nᵀ q_c with signs,
    and λ_i the variance of these rows inside block i: C gradients per sample make it exact. If C is larger than
    `num_probes`, that many q_c are drawn instead, each with probability |σ_c| / Σ|σ|: unbiased, never negative for a
    convex loss, and independent between samples, so that the error shrinks as 1/√(N · num_probes). A random vector in
    parameter space for each block (as `hessian` needs) would have an error of 1/√num_probes, at L times the cost.

    Args:
        loss_fn: (outputs, targets) → scalar, twice differentiable; the model returns a tensor, samples along dim 0.
        num_probes: draws per sample for λ, which is exact if there are no more outputs than that, or for None.
        chunk_size: samples per pass, and rows held at once for λ (at least the draws of one sample); by default 256
            samples and 64 MB of rows.
        data, partition, params, reduction, norm_probes, generator: as for `empirical_fisher`. With "sum", G = Σ_n.
            If the model is random, A and λ belong to different draws of it.

    Cost: L derivatives and min(C, num_probes) gradients per sample. Memory: one pass, d and L numbers per sample of it.

    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    >>> G = ggn(model, torch.nn.functional.mse_loss, (x, torch.zeros(2, 1)))
    >>> torch.allclose(G.matrix.to_dense(), torch.tensor([[7.0, 3.0], [3.0, 7.0]]))  # of 2 E[x xᵀ] = [[5, 3], [3, 9]]
    True
    """
    if num_probes is not None:
        require_count(num_probes, 1, "num_probes", "ggn")
    problem = Problem("ggn", model, loss_fn, partition, params, reduction, chunk_size, generator)
    rows, products = RowSums(problem), Products(problem, norm_probes)
    A = torch.zeros_like(rows.A)
    draws = drawn = 0  # per sample, of one chunk and of any; 0 means that λ is exact

    def factor(out: Tensor, target: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
        return _factor(problem, out, target, noise if draws else None)

    def add(found: Tensor, signs: Tensor) -> Tensor:
        return rows.add_draws(found, signs) if draws else rows.add(found.flatten(0, 1), signs.flatten())

    with problem.evaluation():
        for chunk in problem.chunks(data, problem.samples_per_pass):
            outputs = _outputs(problem.evaluate(chunk))
            draws = 0 if num_probes is None or outputs <= num_probes else num_probes
            drawn = max(drawn, draws)
            for part in chunk.split(max(1, DERIVATIVE_BYTES // (8 * len(A) * outputs))):
                A += _block_curvature(problem, part)
            pull_back(
                problem, chunk, factor, draws or outputs, problem.uniform(chunk.size, draws) if draws else None, add
            )
            if products:
                products.add(ggn_products(problem, chunk, products.Z))
    term = "J_nᵀ H_n J_n, H_n = ∇²ℓ_n in the outputs"
    if not drawn:
        return finish(problem, products, "generalised Gauss-Newton matrix", term, A, rows.lam)
    return finish(
        problem,
        products,
        "generalised Gauss-Newton matrix",
        term,
        A,
        rows.lam,
        probes=drawn,
        estimated=problem.partition.sizes > 1,
        lam_error=rows.error(),
    )


def ggn_products(problem: Problem, chunk: Chunk, Z: Tensor) -> Tensor:
    """Z G of a chunk, (p, d), for directions Z (p, d)."""
    out, pull, push = _jacobian(problem, chunk)
    times = _loss_hessian(problem, chunk, out)
    return torch.stack([problem.flat(pull(times(push(problem.unflat(z))))) for z in Z])


def _outputs(out: Any) -> int:
    """C, the number of outputs per sample."""
    if not isinstance(out, Tensor):
        raise TypeError("ggn: the model must return a tensor with the samples along dim 0.")
    outputs = math.prod(out.shape[1:])
    require(outputs <= LARGEST_OUTPUT, "model", "ggn", f"one with at most {LARGEST_OUTPUT} outputs per sample", outputs)
    return outputs


def _block_curvature(problem: Problem, chunk: Chunk) -> Tensor:
    """Tᵀ H T of a chunk, T = J R, (L, L).

    Some layers have no forward mode, and some have one that disagrees with their gradients (the row `padding_idx` of an
    embedding has none). Gradients decide: T is checked against one of them, and computed from them if it disagrees.
    """
    out, pull, push = _jacobian(problem, chunk)
    try:
        T = torch.stack([_forward_derivative(problem, chunk, r) for r in problem.indicators()])  # (L, n, outputs)
    except NotImplementedError:
        T = None
    if T is None or not _agrees(problem, T, pull):
        T = torch.stack([push(r) for r in problem.indicators()])
    HT = vmap(_loss_hessian(problem, chunk, out))(T)
    problem.refuse_nonfinite(HT, "the loss or a derivative of it", chunk)
    return to_float64(T.flatten(1)) @ to_float64(HT.flatten(1)).mT


def _forward_derivative(problem: Problem, chunk: Chunk, direction: Tensors) -> Tensor:
    """The derivative of the outputs along a direction, by forward mode."""
    problem.reseed()
    point = {name: problem.params[name] for name in direction}
    found: Any = jvp(lambda moved: problem.output({**problem.params, **moved}, chunk.inputs), (point,), (direction,))
    t: Tensor = found[1]
    return t


def _jacobian(
    problem: Problem, chunk: Chunk
) -> tuple[Tensor, Callable[[Tensor], Tensors], Callable[[Tensors], Tensor]]:
    """The outputs, u → Jᵀu, and its transpose v → Jv by differentiating it once more (it is linear in u)."""
    problem.reseed()
    found: Any = vjp(lambda params: problem.output(params, chunk.inputs), problem.params)
    out, backwards = found
    zeros = {name: torch.zeros_like(p) for name, p in problem.params.items()}

    def pull(u: Tensor) -> Tensors:
        gradient: Tensors = backwards(u)[0]
        return gradient

    @cache
    def transpose() -> Any:
        return vjp(pull, torch.zeros_like(out))[1]

    def push(v: Tensors) -> Tensor:
        t: Tensor = transpose()({**zeros, **v})[0]
        return t

    return out, pull, push


def _agrees(problem: Problem, T: Tensor, pull: Callable[[Tensor], Tensors]) -> bool:
    """Whether uᵀ(JR) = (Jᵀu)ᵀR for a random u, up to rounding."""
    u = torch.randn(T.shape[1:], generator=torch.Generator().manual_seed(0)).to(T)
    partition = problem.partition
    wanted = (
        to_float64(partition.block_sum(problem.flat(pull(u)))) / to_float64(partition.sizes.to(problem.device)).sqrt()
    )
    T, u = to_float64(T.flatten(1)), to_float64(u.flatten())
    return bool(((T @ u - wanted).abs() <= problem.tolerance * (T.abs() @ u.abs())).all())


def _loss_hessian(problem: Problem, chunk: Chunk, out: Tensor) -> Callable[[Tensor], Tensor]:
    """t → H t, H the Hessian of Σ ℓ_n over a chunk in the outputs, each ℓ_n from its sample alone."""

    def sample_loss(o: Tensor, target: Any) -> Tensor:
        return problem.loss_fn(single(o), single(target))

    def loss(o: Tensor) -> Tensor:
        losses: Tensor = problem.each(sample_loss, o, chunk.targets)
        return losses.sum()

    pull = vjp(grad(loss), out)[1]

    def times(t: Tensor) -> Tensor:
        product: Tensor = pull(t)[0]
        return product

    return times


def _factor(problem: Problem, out: Tensor, target: Any, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """√|σ| q and sign σ of the eigenvectors of H_n: all of them (C, C), or those that uniform noise (k,) picks."""

    def loss(o: Tensor) -> Tensor:
        return problem.loss_fn(single(o), single(target))

    pull = vjp(grad(loss), out)[1]
    units = torch.eye(out.numel(), dtype=out.dtype, device=out.device)
    H = to_float64(vmap(lambda e: pull(e.view_as(out))[0].flatten())(units))
    sigma, Q = torch.linalg.eigh((H + H.mT) / 2)
    if noise is None:
        return (Q * sigma.abs().sqrt()).mT, sigma.sign()
    steps = sigma.abs().cumsum(0)
    # Rounding must not lead past the last step.
    picked = (steps[:-1] <= noise.to(steps).unsqueeze(1) * steps[-1]).sum(1)
    return steps[-1].sqrt() * Q.mT[picked], sigma.sign()[picked]
