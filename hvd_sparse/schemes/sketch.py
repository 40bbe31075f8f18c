"""A count-sketch of every rank's values, whose sum shows which coordinates are large in the sum."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hvd_sparse.collectives.requests import AllReduce, Broadcast
from hvd_sparse.ops.base import PRIME, Ops
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, State, World, check_count


class Sketch:
    """The k largest of the sum, among candidates that an allreduced count-sketch finds: large together, small alone.

    Candidates are fetched exactly before the k largest of them are chosen, so that error feedback loses nothing.

    Traffic: 2(P-1)/P (rows cells + candidates) k + candidates k words per rank and step, three collectives of constant
    shape; less than 92 k with the defaults, whatever P. Decoding reads `num_rows` random cells per element.
    Choose it for studies of gradients whose large entries no rank sees alone. Avoid it elsewhere: `owner_reduce` sends
    a twentieth of that, `allgather` less up to 46 ranks, and decoding costs more time than any sparsifier. Where the
    sketch would be as large as the bucket (with the defaults at a density above 1 / 44) the exchange is dense.

    Args:
        num_rows: independent estimates of each element, of which the median counts; odd.
        cells_per_entry: cells of a row, in units of k. Half of the default misses one planted entry in twenty.
        candidates: elements whose sums are fetched exactly, in units of k.
        seed: of the hash functions; any int, equal on all ranks.

    Raises:
        ValueError, TypeError: an argument is out of range.

    Reference: reconstructed from the abstract of gs-SGD, arXiv:2108.06004, 2021, and from its base: N. Ivkin et al.,
    Communication-Efficient Distributed SGD with Sketching, NeurIPS 2019, arXiv:1903.04488; M. Charikar, K. Chen,
    M. Farach-Colton, Finding Frequent Items in Data Streams, ICALP 2002. Ours: an allreduce in place of a tree, and one
    hash for cell and sign, modulo 2^31 - 1, which every library's integers hold. For momentum, `memory="momentum"`.

    Example:
        >>> import numpy as np
        >>> from hvd_sparse.drivers.simulate import Simulator
        >>> from hvd_sparse.ops.numpy import NumpyOps
        >>> from hvd_sparse.types import Spec, World
        >>> inputs = [np.zeros(100, np.float32) for _ in range(2)]
        >>> inputs[0][[7, 50]], inputs[1][[7, 60]] = [3, 5], [3, -5]
        >>> spec = Spec("b", 100)
        >>> programs = [Sketch().reduce(NumpyOps(), World(r, 2), spec, inputs[r], 1, {}) for r in range(2)]
        >>> total = Simulator(2).run(programs)[0][0].total
        >>> np.flatnonzero(total), total[7]
        (array([7]), np.float32(6.0))
    """

    exact = True
    selects = True

    def __init__(self, num_rows: int = 5, cells_per_entry: int = 8, candidates: int = 4, seed: int = 0) -> None:
        self.num_rows = check_count(num_rows, "num_rows")
        if self.num_rows % 2 == 0:
            raise ValueError(f"`num_rows` must be odd: a median is taken over rows. Received: num_rows={num_rows!r}.")
        self.cells_per_entry = check_count(cells_per_entry, "cells_per_entry")
        self.candidates = check_count(candidates, "candidates")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"`seed` must be an int. Received: seed={seed!r}.")
        self.seed = seed

    def init(self, ops: Ops, spec: Spec, like: Array | None = None) -> State:
        return {}

    def reduce(
        self, ops: Ops, world: World, spec: Spec, x: Array, k: int, state: State
    ) -> Program[tuple[Reduced, State]]:
        num_cells, num_candidates = self.cells_per_entry * k, self.candidates * k
        if self.num_rows * num_cells + num_candidates >= spec.size:
            return (yield from Dense().reduce(ops, world, spec, x, k, state))

        # Which coordinates seem to be large.
        if world.size == 1:
            found = ops.as_int32(ops.top_abs(x, k))
        else:
            cells = hashed_cells(ops, spec.size, self.num_rows, num_cells, f"{self.seed}:{spec.name}", x)
            table = yield AllReduce(encode(ops, x, cells, num_cells), tag=f"table.k{k}")
            found = ops.as_int32(ops.top_abs(decode(ops, table, cells), num_candidates))
            # Equal estimates are common, and which of them goes is a library's choice: that of one rank.
            found = yield Broadcast(found, 0, tag=f"candidates.k{k}")

        # Which of them are.
        values = ops.gather(x, found)
        # The selection may miss this rank's NaN: send it in place of the values, so that all ranks see it.
        sums = yield AllReduce(ops.where(ops.all_finite(x), values, values * float("nan")), tag=f"values.k{k}")
        largest = ops.top_abs(sums, k)
        indices, sent = ops.gather(found, largest), ops.gather(sums, largest)
        total = ops.scatter_sum(spec.size, [(indices, sent * world.gain)])
        return Reduced(total, Sparse(indices, ops.gather(x, indices), spec.size), ops.all_finite(sums)), state


def hashed_cells(ops: Ops, n: int, num_rows: int, num_cells: int, seed: str, like: Array) -> list[Array]:
    """Of every row, the cell (n,) of each coordinate, four-wise independent.

    A row has its cells twice: coordinates in the second copy are those of negative sign.
    """
    draw = random.Random(seed)  # equal in every process and version
    polynomials = [[draw.randrange(PRIME) for _ in range(4)] for _ in range(num_rows)]
    copies = 2 * num_cells
    return [ops.residues(n, terms, like) % copies + row * copies for row, terms in enumerate(polynomials)]


def encode(ops: Ops, x: Array, cells: Sequence[Array], num_cells: int) -> Array:
    """The sketch (rows, num_cells) of x (n,): in every cell the sum of the coordinates there, with their signs."""
    shape = (len(cells), 2 * num_cells)
    both = ops.reshape(ops.scatter_sum(shape[0] * shape[1], [(row, x) for row in cells]), shape)
    return both[:, :num_cells] - both[:, num_cells:]


def decode(ops: Ops, table: Array, cells: Sequence[Array]) -> Array:
    """(n,) estimates of what was sketched: the median over rows of what each coordinate's cell holds."""
    both = ops.reshape(ops.join([table, -table]), (-1,))
    rows = [ops.gather(both, row) for row in cells]
    for unsorted in range(len(rows) - 1, len(rows) // 2 - 1, -1):  # the largest to the end, down to the median
        for row in range(unsorted):
            lower, upper = rows[row], rows[row + 1]
            rows[row], rows[row + 1] = ops.minimum(lower, upper), ops.maximum(lower, upper)
    return rows[len(rows) // 2]
