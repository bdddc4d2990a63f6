"""The Fisher matrix and the empirical Fisher matrix in block-mean form, from gradients of single samples."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from blockmean._checks import require
from blockmean.blocks import By
from blockmean.curvature._norm import Products
from blockmean.curvature._problem import Data, LossFn, Params, Problem, require_count, single
from blockmean.curvature._rows import RowSums, pull_back
from blockmean.curvature.ggn import LARGEST_OUTPUT, ggn_products
from blockmean.curvature.report import Curvature, finish
from blockmean.partition import Partition


def empirical_fisher(
    model: nn.Module,
    loss_fn: LossFn,
    data: Data,
    partition: Partition | By = "tensor",
    *,
    params: Params | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    norm_probes: int = 0,
    generator: torch.Generator | None = None,
) -> Curvature:
    """The block mean of F = (1/N) Σ_n g_n g_nᵀ, g_n the gradient of the loss of sample n: Proposition 1, exactly.

    A = Rᵀ F R from the block sums of g_n, λ_i from their variance inside block i. Cost: one gradient per
    sample, plus O(N d + N L²); memory O(chunk_size · d + L²), never N × d or d × d.

    Args:
        model: any module `torch.func.functional_call` can call; its mode, gradients and buffers do not change.
        loss_fn: (outputs, targets) → scalar.
        data: a pair (inputs, tensor of targets), or an iterable of (inputs, targets) in batches of any sizes; inputs
            are a tensor, a tuple of arguments or a dict of keyword arguments. It is read once.
        partition: of the chosen parameters, flattened and laid end to end, or how to cut them (as `Partition.of`).
        params: the names of the parameters, or a predicate (name, tensor) → bool; by default those that require
            gradients. Tied parameters count once.
        reduction: how loss_fn reduces a batch, "mean" or "sum". With "sum", F = Σ_n g_n g_nᵀ.
        chunk_size: samples whose gradients are held at once, by default as many as fit into 64 MB.
        norm_probes: products with random signs that estimate `report.explained`; 0 leaves it out.
        generator: for all random numbers; a model that is random itself (dropout) needs one.

    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    >>> F = empirical_fisher(model, lambda out, _: out.mean(), (x, x))  # the gradients are the inputs themselves
    >>> F.matrix.lam, F.matrix.B  # the block mean of [[2.5, 1.5], [1.5, 4.5]]
    (tensor([2.]), tensor([[1.5000]]))
    """
    problem = Problem("empirical_fisher", model, loss_fn, partition, params, reduction, chunk_size, generator)
    gradients = partial(grad_and_value(problem.sample_loss), problem.params)
    sums, products = RowSums(problem), Products(problem, norm_probes)
    with problem.evaluation():
        for chunk in problem.chunks(data, problem.rows_per_pass):
            gradient, losses = problem.each(gradients, chunk.inputs, chunk.targets)
            problem.refuse_nonfinite(losses, "the loss", chunk)
            rows = problem.flat(gradient, batch_dims=1)
            problem.refuse_nonfinite(sums.add(rows), "the gradient", chunk)
            if products:
                products.add_rows(rows)
            del gradient, rows  # free the memory before the next ones
    return finish(problem, products, "empirical Fisher", "g_n g_nᵀ, g_n = ∇ℓ_n", sums.A, sums.lam)


def fisher(
    model: nn.Module,
    loss_fn: LossFn,
    data: Data,
    partition: Partition | By = "tensor",
    *,
    labels: str = "exact",
    params: Params | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    num_probes: int = 1,
    norm_probes: int = 0,
    generator: torch.Generator | None = None,
) -> Curvature:
    """The block mean of the Fisher matrix (1/N) Σ_n κ E_y[∇log p(y|x_n) ∇log p(y|x_n)ᵀ], y drawn from the model.

    The model's likelihood p is that of the loss: categorical for cross-entropy, Gaussian for the squared error, and κ
    is such that the loss of a sample is −κ log p: 1 for cross-entropy of one label per sample (1/T for the mean of T
    labels; those with `ignore_index` do not count) and, with p of variance 1, 2/C for the mean of C squared errors, 2
    for their sum. The matrix then equals the generalised Gauss-Newton matrix of the same loss (`ggn`), computed
    in another way.

    Args:
        loss_fn: `torch.nn.functional.cross_entropy` or `mse_loss`, a `functools.partial` of them, `nn.CrossEntropyLoss`
            or `nn.MSELoss`, without class weights or label smoothing.
        labels: "exact", the expectation over y (C gradients per sample), or "sampled".
        num_probes: with sampled labels, the number of draws per sample. With two or more, `report.lam_error` is their
            standard error; with one it is an upper estimate.
        data, partition, params, reduction, chunk_size, norm_probes, generator: as for `empirical_fisher`; the
            targets matter only where they are ignored. `chunk_size` counts gradients, C (or num_probes) per sample.

    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    >>> F = fisher(model, torch.nn.functional.mse_loss, (x, torch.zeros(2, 1)))
    >>> torch.allclose(F.matrix.to_dense(), torch.tensor([[7.0, 3.0], [3.0, 7.0]]))  # of 2 E[x xᵀ] = [[5, 3], [3, 9]]
    True
    >>> print(F.report)
    Fisher over 2 samples: 2 parameters in 1 block
      M = 1/N Σ_n κ E_y[∇log p ∇log pᵀ], ℓ_n = −κ log p(y_n|x_n) + const, p Gaussian of variance 1, κ = 2, N = 2
      A and λ are exact
      share of ‖M‖²_F in the block mean: not measured (norm_probes=0)
    """
    require(labels in ("exact", "sampled"), "labels", "fisher", "'exact' or 'sampled'", labels)
    require_count(num_probes, 1, "num_probes", "fisher")
    likelihood, ignored = _likelihood(loss_fn)
    problem = Problem("fisher", model, loss_fn, partition, params, reduction, chunk_size, generator)
    sums, products = RowSums(problem), Products(problem, norm_probes)
    exact, mean = labels == "exact", reduction == "mean"
    kappas: set[float] = set()

    def add(rows: Tensor, signs: Tensor) -> Tensor:
        return sums.add(rows.flatten(0, 1)) if exact else sums.add_draws(rows, signs)

    with problem.evaluation():
        for chunk in problem.chunks(data, problem.rows_per_pass):
            out = problem.evaluate(chunk)
            if not isinstance(out, Tensor):
                raise TypeError("fisher: the model must return a tensor, as cross_entropy and mse_loss take it.")
            outputs, positions = math.prod(out.shape[1:]), math.prod(out.shape[2:])
            few = f"one with at most {LARGEST_OUTPUT} outputs per sample (or labels='sampled')"
            require(outputs <= LARGEST_OUTPUT or not exact, "model", "fisher", few, outputs)
            if likelihood == "categorical":
                kappas.update(_label_weights(chunk.targets, positions, mean, ignored).amax(1).tolist())
                factor = partial(_categorical, mean=mean, ignored=ignored, exact=exact)
                noise = None if exact else problem.uniform(chunk.size, num_probes, 1, positions)
            else:
                kappas.add(2 / outputs if mean else 2.0)
                factor = partial(_gaussian, mean=mean, exact=exact)
                noise = None if exact else problem.normal(chunk.size, num_probes, outputs)
            pull_back(problem, chunk, factor, outputs if exact else num_probes, noise, add)
            if products:
                products.add(ggn_products(problem, chunk, products.Z))
    kind = "categorical" if likelihood == "categorical" else "Gaussian of variance 1"
    kappa = " to ".join(f"{k:.6g}" for k in sorted({min(kappas), max(kappas)}))
    term = f"κ E_y[∇log p ∇log pᵀ], ℓ_n = −κ log p(y_n|x_n) + const, p {kind}, κ = {kappa}"
    if exact:
        return finish(problem, products, "Fisher", term, sums.A, sums.lam)
    estimated = problem.partition.sizes > 1
    return finish(
        problem,
        products,
        "Fisher with sampled labels",
        term,
        sums.A,
        sums.lam,
        probes=num_probes,
        estimated=estimated,
        exact_A=False,
        lam_error=sums.error(),
    )


def _likelihood(loss_fn: LossFn) -> tuple[str, int]:
    """The p whose −log is the loss, or an error; and the label that is ignored."""
    inner: Any = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    options = loss_fn.keywords if isinstance(loss_fn, partial) else getattr(loss_fn, "__dict__", {})
    if inner is nn.functional.cross_entropy or type(inner) is nn.CrossEntropyLoss:
        found = "categorical"
    elif inner is nn.functional.mse_loss or type(inner) is nn.MSELoss:
        found = "gaussian"
    else:
        raise ValueError(
            f"fisher must know the likelihood behind the loss. Got {loss_fn!r}; known are torch.nn.functional."
            "cross_entropy and mse_loss (or a functools.partial of them), nn.CrossEntropyLoss and nn.MSELoss. "
            "empirical_fisher and ggn take any loss."
        )
    weighted = getattr(inner, "weight", None) is not None or options.get("weight") is not None
    smooth = options.get("label_smoothing", 0.0)
    if weighted or smooth:
        what = "class weights" if weighted else f"label_smoothing={smooth}"
        raise ValueError(f"fisher: a loss with {what} is no log-likelihood. empirical_fisher and ggn take any loss.")
    return found, options.get("ignore_index", -100)


def _label_weights(targets: Tensor, positions: int, mean: bool, ignored: int) -> Tensor:
    """κ of the labels of samples, 0 where they are ignored, (n, positions)."""
    if targets.is_floating_point():  # probabilities of classes
        counted = targets.new_ones(len(targets), positions, dtype=torch.float64)
    else:
        counted = (targets.reshape(len(targets), positions) != ignored).double()
    return counted / counted.sum(1, keepdim=True).clamp(min=1) if mean else counted


def _categorical(
    out: Tensor, target: Any, noise: Tensor, *, mean: bool, ignored: int, exact: bool
) -> tuple[Tensor, Tensor]:
    """Gradients √κ (p − e_y) of −log p in the outputs (C, ...) of one sample.

    Exact: one for each class y at each position, weighted by √p_y; scores at different positions are uncorrelated.
    Sampled: one per draw, by inverting the distribution function at uniform noise (k, 1, positions).
    """
    p = out.double().flatten(1).softmax(0) if out.ndim > 1 else out.double().softmax(0).unsqueeze(1)  # (C, positions)
    C, T = p.shape
    root = _label_weights(single(target), T, mean, ignored)[0].sqrt()  # (positions,)
    if exact:
        classes = torch.eye(C, dtype=p.dtype, device=p.device)
        score = p.mT.unsqueeze(1) - classes  # (positions, y, C)
        score = score * p.mT.unsqueeze(2).sqrt()
        V = torch.einsum("tyc,ts->tycs", score, torch.diag(root)).reshape(T * C, C * T)
    else:
        # The last step of the distribution function is 1 up to rounding; y must not go past it.
        y = (p.cumsum(0)[:-1] <= noise.double()).sum(1)  # (k, positions)
        V = ((p - nn.functional.one_hot(y, C).mT) * root).flatten(1)
    return V, V.new_ones(len(V))


def _gaussian(out: Tensor, _: Any, noise: Tensor, *, mean: bool, exact: bool) -> tuple[Tensor, Tensor]:
    """Gradients √κ (f − y) of −log p in the outputs of one sample, exact (the unit vectors) or from normal noise."""
    V = torch.eye(out.numel(), dtype=torch.float64, device=out.device) if exact else noise.double()
    return (2 / out.numel() if mean else 2.0) ** 0.5 * V, V.new_ones(len(V))
