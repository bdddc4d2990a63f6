"""The Fisher matrix and the empirical Fisher matrix in block-mean form, from gradients of single samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from blockmean._checks import require
from blockmean._cut import By
from blockmean.curvature._norm import Products
from blockmean.curvature._problem import Data, LossFn, Params, Problem
from blockmean.curvature._rows import Factor, RowSums, pull_back
from blockmean.curvature.report import Curvature, Report
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
    """The block mean of F = (1/N) Σ_n g_n g_nᵀ, g_n the gradient of the loss of sample n (Proposition 1 on it, exactly).

    A = R^T F R from the block sums of g_n, λ_i from their variance inside block i. It takes one per-sample gradient
    per sample and O(N d + N L²) besides; memory O(chunk_size · d + L²), never N × d or d × d.

    Args:
        model: any module `torch.func.functional_call` can call; its mode, gradients and buffers stay as they are.
        loss_fn: (outputs, targets) → scalar.
        data: a pair of tensors, or an iterable of (inputs, targets) in batches of any sizes; inputs are a tensor, a
            tuple of arguments or a dict of keyword arguments. It is walked once.
        partition: of the chosen parameters, flattened and laid end to end, or how to cut them (as `Partition.of`).
        params: the names of the parameters, or a predicate (name, tensor) → bool; by default those that require
            gradients. Tied parameters count once.
        reduction: how loss_fn reduces a batch, "mean" or "sum". With "sum", F = Σ_n g_n g_nᵀ.
        chunk_size: samples whose gradients are held at once, by default as many as fit into 64 MB.
        norm_probes: products with random signs from which `report.explained` is estimated; 0: not at all.
        generator: of all random numbers; a model that is random itself (dropout) is refused without one.

    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    >>> F = empirical_fisher(model, lambda out, _: out.mean(), (x, x))  # the gradients are the inputs themselves
    >>> F.lam, F.B  # the block mean of [[2.5, 1.5], [1.5, 4.5]]
    (tensor([2.]), tensor([[1.5000]]))
    """
    problem = Problem("empirical_fisher", model, loss_fn, partition, params, reduction, chunk_size, generator)
    gradients = vmap(grad_and_value(problem.sample_loss), in_dims=(None, 0, 0), randomness="different")
    sums, products = RowSums(problem), Products(problem, norm_probes)
    with problem.evaluation():
        for chunk in problem.chunks(data, problem.rows_per_pass):
            gradient, losses = gradients(problem.params, chunk.inputs, chunk.targets)
            problem.refuse_nonfinite(losses, "the loss", chunk)
            rows = problem.flat(gradient, batch_dims=1)
            problem.refuse_nonfinite(sums.add(rows), "the gradient", chunk)
            if products:
                products.add_rows(rows)
    equation = f"M = {problem.sum_sign} g_n g_nᵀ, g_n = ∇ℓ_n"
    return finished(problem, sums, products, "empirical Fisher", equation, 0)


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
    labels) and, with p of variance 1, 2/C for the mean of C squared errors, 2 for their sum. The matrix then equals the
    generalised Gauss-Newton matrix of the same loss (`ggn`), found another way.

    Args:
        loss_fn: `torch.nn.functional.cross_entropy` or `mse_loss`, a `functools.partial` of them, `nn.CrossEntropyLoss`
            or `nn.MSELoss`, without class weights or label smoothing.
        labels: "exact", the expectation over y (C gradients per sample), or "sampled".
        num_probes: with sampled labels, how many are drawn per sample. From two on, `report.lam_error` is their
            standard error; from one it is an upper estimate of it.
        data, partition, params, reduction, chunk_size, norm_probes, generator: as for `empirical_fisher`; the targets
            are used for checks alone. `chunk_size` counts gradients, C (or num_probes) of them per sample.

    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    >>> F = fisher(model, torch.nn.functional.mse_loss, (x, torch.zeros(2, 1)))
    >>> F.lam, F.B  # 2 E[x xᵀ]
    (tensor([4.]), tensor([[3.]]))
    >>> print(F.report)
    Fisher over 2 samples: 2 parameters in 1 block
      M = 1/N Σ_n, N = 2 κ E_y[∇log p ∇log pᵀ], p Gaussian of variance 1, κ = 2, y exact
      A and λ are exact
      share of ‖M‖²_F in the block mean: not measured (norm_probes=0)
    """
    require(labels in ("exact", "sampled"), "labels", "fisher", "'exact' or 'sampled'", labels)
    require(num_probes >= 1, "num_probes", "fisher", "at least 1", num_probes)
    likelihood = _likelihood(loss_fn)
    problem = Problem("fisher", model, loss_fn, partition, params, reduction, chunk_size, generator)
    sums, products = RowSums(problem), Products(problem, norm_probes)
    exact = labels == "exact"
    kappa = 1.0

    def add(rows: Tensor, signs: Tensor) -> None:
        n, k, _ = rows.shape
        if exact:
            sums.add(rows.flatten(0, 1))
        else:
            sums.add_draws(rows, signs)
        if products:
            products.add_rows(rows.flatten(0, 1), None if exact else torch.full((n * k,), 1 / k))

    with problem.evaluation():
        for chunk in problem.chunks(data, problem.rows_per_pass):
            shape = problem.output_shape
            if shape is None:
                raise TypeError("fisher: the model must return a tensor, as cross_entropy and mse_loss take it.")
            outputs, positions = math.prod(shape), math.prod(shape[1:])
            if likelihood == "categorical":
                kappa = 1 / positions if reduction == "mean" else 1.0
                factor = partial(_categorical, kappa=kappa, exact=exact)
                draw = partial(torch.rand, (chunk.size, num_probes, 1, positions))
            else:
                kappa = 2 / outputs if reduction == "mean" else 2.0
                factor = partial(_gaussian, kappa=kappa, exact=exact)
                draw = partial(torch.randn, (chunk.size, num_probes, outputs))
            noise = None
            if not exact:
                noise = draw(generator=problem.generator, device=problem.generator.device).to(problem.device)
            pull_back(problem, chunk, factor, outputs if exact else num_probes, noise, add)
    kind = "categorical" if likelihood == "categorical" else "Gaussian of variance 1"
    told = f"p {kind}, κ = {kappa:.6g}, y {'exact' if exact else f'{num_probes} per sample'}"
    equation = f"M = {problem.sum_sign} κ E_y[∇log p ∇log pᵀ], {told}"
    return finished(problem, sums, products, "Fisher", equation, 0 if exact else num_probes)
