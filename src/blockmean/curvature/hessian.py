"""The Hessian of the loss in block-mean form, from products with block indicators and with probes inside blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import grad, vjp

from blockmean._linalg import to_float64
from blockmean.blocks import By
from blockmean.curvature._norm import Products
from blockmean.curvature._problem import Chunk, Data, LossFn, Params, Problem, Tensors, require_count
from blockmean.curvature.report import Curvature, finish
from blockmean.partition import Partition


def hessian(
    model: nn.Module,
    loss_fn: LossFn,
    data: Data,
    partition: Partition | By = "tensor",
    *,
    params: Params | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    num_probes: int | None = 16,
    share_probes: bool = False,
    norm_probes: int = 0,
    generator: torch.Generator | None = None,
) -> Curvature:
    """The block mean of H = (1/N) Σ_n ∇²ℓ_n.

    A = Rᵀ H R is exact: L Hessian-vector products with the block indicators. λ_i is the mean of qᵀHq over the s_i − 1
    directions q of block i that sum to zero. If these are no more than `num_probes`, all are used, and λ_i is exact.
    Larger blocks take random signs z on the block, minus their mean: zᵀHz / (s_i − 1) has the expectation λ_i. Every
    chunk of the data has its own probes, so that their errors average out.

    All blocks could share the products of one probe. That stays unbiased, because signs in different blocks are
    independent, but every zᵢᵀ H_ij z_j is then noise in λ_i: large neighbours drown a block of small curvature. With
    its own probes, the relative standard error of λ_i is at most √(2/num_probes) where H_ii is
    positive semi-definite, whatever the other blocks are. So they are not shared by default; `share_probes=True` costs
    num_probes products in all instead of num_probes per block, for many blocks of similar curvature.

    Args:
        num_probes: probes per block for λ; None makes every λ exact, at d − L products.
        share_probes: whether the blocks that need probes share them.
        chunk_size: samples per pass, by default 256.
        loss_fn: (outputs, targets) → scalar, twice differentiable, as the model must be.
        data, partition, params, reduction, norm_probes, generator: as for `empirical_fisher`. With "sum", H is the sum.

    Cost: per chunk, L + Σ_i min(s_i − 1, num_probes) products, each about a gradient. Memory: one pass, O(d + L²).

    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    >>> H = hessian(model, torch.nn.functional.mse_loss, (x, torch.zeros(2, 1)))
    >>> torch.allclose(H.matrix.to_dense(), torch.tensor([[7.0, 3.0], [3.0, 7.0]]))  # of 2 E[x xᵀ] = [[5, 3], [3, 9]]
    True
    """
    if num_probes is not None:
        require_count(num_probes, 1, "num_probes", "hessian")
    problem = Problem("hessian", model, loss_fn, partition, params, reduction, chunk_size, generator)
    partition, products = problem.partition, Products(problem, norm_probes)
    sizes = to_float64(partition.sizes.to(problem.device))
    estimated = partition.sizes - 1 > num_probes if num_probes is not None else partition.sizes < 0
    draws = num_probes if num_probes is not None and bool(estimated.any()) else 0
    entries = problem.entries
    A, lam = torch.diag_embed(0 * sizes), 0 * sizes
    drawn = sizes.new_zeros(draws, partition.num_blocks)  # estimates of λ summed over the data, one row per probe
    with problem.evaluation():
        for chunk in problem.chunks(data, problem.samples_per_pass):
            problem.evaluate(chunk)
            product = _products(problem, chunk)
            for j, r in enumerate(problem.indicators()):
                column = partition.block_sum(product(r))
                problem.refuse_nonfinite(column, "the loss or a derivative of it", chunk)
                A[:, j] += to_float64(column) / sizes.sqrt()
            for i in (~estimated & (partition.sizes > 1)).nonzero().flatten().tolist():
                for q in _centred_basis(len(entries[i])):
                    lam[i] += _quadratic_form(problem, product, entries[i], q) / (len(q) - 1)
            for k in range(draws):
                if share_probes:
                    drawn[k] += _shared_quadratic_forms(problem, product, estimated) / (sizes - 1).clamp(min=1)
                    continue
                for i in estimated.nonzero().flatten().tolist():
                    z = problem.signs(len(entries[i]))
                    drawn[k, i] += _quadratic_form(problem, product, entries[i], z - z.mean()) / (len(z) - 1)
            if products:
                products.add(torch.stack([product(problem.unflat(z)) for z in products.Z]))
    if not draws:
        return finish(problem, products, "Hessian", "∇²ℓ_n", A, lam)
    lam = torch.where(estimated.to(lam.device), drawn.mean(0), lam)
    error = drawn.std(0) / draws**0.5 if draws > 1 else torch.where(estimated, torch.nan, 0.0).to(lam)
    return finish(problem, products, "Hessian", "∇²ℓ_n", A, lam, probes=draws, estimated=estimated, lam_error=error)


def _products(problem: Problem, chunk: Chunk) -> Callable[[Tensors], Tensor]:
    """The Hessian of the total loss of a chunk as a function: direction → product (d,).

    The gradient is computed once for all directions; each then costs one pass back through it. (Forward mode would
    start from the inputs for each of them, and torch 2.13 cannot take it through the gradient of mse_loss.)
    """

    def slope(params: Tensors) -> Tensors:
        found: Tensors = grad(lambda p: problem.total_loss(problem.output(p, chunk.inputs), chunk))(params)
        return found

    pull = vjp(slope, problem.params)[1]
    zeros = {name: torch.zeros_like(p) for name, p in problem.params.items()}
    return lambda direction: problem.flat(pull({**zeros, **direction})[0])


def _quadratic_form(problem: Problem, product: Callable[[Tensors], Tensor], entries: Tensor, z: Tensor) -> Tensor:
    """zᵀHz for a vector z on some entries."""
    found = product(problem.tangent(entries, z))[entries.to(problem.device)]
    return to_float64(found) @ to_float64(z.to(problem.device))


def _shared_quadratic_forms(problem: Problem, product: Callable[[Tensors], Tensor], estimated: Tensor) -> Tensor:
    """z_iᵀ (Hz)_i of all blocks that need probes, (L,), for one vector z of random signs minus their block means."""
    partition = problem.partition
    z = problem.signs(partition.num_entries) * partition.expand(estimated.double())
    z = (z - partition.expand(partition.block_sum(z) / partition.sizes)).to(problem.device)
    return partition.block_sum(to_float64(z) * to_float64(product(problem.unflat(z))))


def _centred_basis(size: int) -> Iterator[Tensor]:
    """An orthonormal basis of the vectors of a block that sum to zero (Helmert's), in float64."""
    for k in range(1, size):
        q = torch.zeros(size, dtype=torch.float64)
        q[:k], q[k] = 1, -k
        yield q / (k * (k + 1)) ** 0.5
