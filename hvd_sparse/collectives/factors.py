"""Gradients of linear layers as what they are products of: dAD, exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_sparse.collectives.requests import AllGather, AllReduce
from hvd_sparse.ops.base import Ops
from hvd_sparse.types import Array, Program, World


@dataclass(frozen=True)
class Product:
    """One rank's gradient of a layer's weight (d_out, d_in), in float32.

    Attributes:
        shape: (d_out, d_in), equal on all ranks.
        whole: (d_out * d_in,) the gradient itself; zeros where this rank did not use the layer.
        factors: the layer's inputs (R, d_in) and the gradients of its outputs (R, d_out), of which `whole` is the
            product; R = 0 where this rank did not use the layer. None: they are not known, or not all there is.
    """

    shape: tuple[int, int]
    whole: Array
    factors: tuple[Array, Array] | None

    @property
    def num_rows(self) -> int:
        """R, or -1 for unknown factors."""
        return -1 if self.factors is None else int(self.factors[0].shape[0])


def sum_products(ops: Ops, world: World, layers: Sequence[Product]) -> Program[list[tuple[Array, bool]]]:
    """Every layer's gradient (d_out, d_in), summed over ranks, and whether it travelled as factors.

    A layer does where `is_smaller` says so for the ranks' present numbers of rows. Otherwise its gradient travels.

    Traffic: sum over the other ranks of R (d_in + d_out) words per layer as factors, 2 d_in d_out (P-1)/P per other
    layer, and a word per layer and rank: at most three collectives for all layers.
    Choose it for large layers and few rows: small batches and few ranks. Avoid it where processors are the bottleneck:
    every rank multiplies the rows of all, P times the work of its own. Ranks compute the same product from the same
    factors: they need the same library, kind of processor and number of threads.

    Args:
        layers: the same on all ranks, in the same order; at least one. Lengths are ints: it does not run in a graph.

    Reference: B. Baker, A. Khanal, V. Calhoun, B. Pearlmutter, S. Plis, Peering Beyond the Gradient Veil with
    Distributed Auto Differentiation, 2021, arXiv:2102.09631. Ours: all layers travel together, and the caller divides.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> a, d = np.float32([[1, 2, 3]]), np.float32([[1, 0, 2]])
        >>> layer = Product((3, 3), (d.T @ a).reshape(-1), (a, d))
        >>> simulator = Simulator(2)
        >>> [(total, as_factors)] = simulator.run([sum_products(NumpyOps(), World(r, 2), [layer]) for r in range(2)])[0]
        >>> total.tolist(), as_factors, simulator.words
        ([[2.0, 4.0, 6.0], [0.0, 0.0, 0.0], [4.0, 8.0, 12.0]], True, 7.0)
    """
    counts = yield from gather_rows(ops, world, layers)
    small = [is_smaller(world.size, rows, layer.shape) for rows, layer in zip(counts, layers)]

    # Inputs and output gradients of one layer after the other.
    own = [
        ops.reshape(matrix, (-1,)) for layer, yes in zip(layers, small) if yes and layer.factors
        for matrix in layer.factors
    ]  # fmt: skip
    lengths = [
        [rows[rank] * width for rows, layer, yes in zip(counts, layers, small) if yes for width in layer.shape[::-1]]
        for rank in range(world.size)
    ]
    factors: list[Any] = [[] for _ in own]
    if sum(map(sum, lengths)):
        gathered = yield AllGather(ops.concat(own), tag="rows")
        start = 0
        for rank_lengths in lengths:  # in rank order: equal bits on all ranks
            for blocks, length in zip(factors, rank_lengths):
                blocks.append(gathered[start : start + length])
                start += length

    others = [layer.whole for layer, yes in zip(layers, small) if not yes]
    if others:
        whole = yield AllReduce(ops.concat(others), tag="whole")

    totals, start = [], 0
    for layer, yes in zip(layers, small):
        size = layer.shape[0] * layer.shape[1]
        if yes:
            inputs, outputs = factors.pop(0), factors.pop(0)
            total = _product(ops, layer, inputs, outputs)
        else:
            total = ops.reshape(whole[start : start + size], layer.shape)
            start += size
        totals.append((total, yes))
    return totals


def gather_rows(ops: Ops, world: World, layers: Sequence[Product]) -> Program[list[list[int]]]:
    """Per layer every rank's number of rows, -1 where it does not know its factors."""
    own = ops.integers([layer.num_rows for layer in layers], layers[0].whole)
    answer = yield AllGather(own, tag="count", same_length=True)
    numbers = answer.tolist()
    return [numbers[number :: len(layers)] for number in range(len(layers))]


def is_smaller(size: int, rows: Sequence[int], shape: tuple[int, int]) -> bool:
    """Whether factors are known on all ranks and fewer words than an allreduce: P R < 2 d_in d_out / (d_in + d_out).

    Args:
        size: P.
        rows: of every rank; R is the most.
        shape: (d_out, d_in).

    >>> is_smaller(8, [511] * 8, (4096, 4096)), is_smaller(8, [512] * 8, (4096, 4096))
    (True, False)
    """
    return min(rows) >= 0 and size * max(rows) * sum(shape) < 2 * shape[0] * shape[1]


def _product(ops: Ops, layer: Product, inputs: list[Array], outputs: list[Array]) -> Array:
    if not inputs:
        return ops.reshape(ops.zeros(layer.shape[0] * layer.shape[1], layer.whole), layer.shape)
    height, width = layer.shape
    a, d = ops.reshape(ops.concat(inputs), (-1, width)), ops.reshape(ops.concat(outputs), (-1, height))
    return ops.transpose(d) @ a
