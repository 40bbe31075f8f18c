"""The array operations that algorithms are written in. One implementation per library; NumPy's is the oracle.

Arithmetic, comparisons and basic slices are used directly on arrays; everything else goes through these methods.
`out=` is permission, not duty: a back end may write the result there. Inputs are never modified except where said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvd_sparse.types import Array

PRIME = 2**31 - 1  # products of two residues fit into 63 bits, in Python and in every tensor library


class Ops(Protocol):
    """Coarse operations on 1-D arrays, and a few on matrices: B messages, one in each row.

    "Length" is an int, or a 0-d integer tensor while tracing.
    """

    name: str

    def zeros(self, n: Any, like: Array | None = None) -> Array:
        """(n,) float32 zeros, on the device of `like`. NumPy keeps the type of wider and integer arrays."""

    def integers(self, values: Sequence[int], like: Array) -> Array:
        """(len(values),) int32: splits of an alltoall, for example."""

    def add(self, x: Array, y: Array, alpha: float = 1.0, out: Array | None = None) -> Array:
        """x + alpha * y in the dtype of x."""

    def blend(self, x: Array, factor: float, y: Array, alpha: float = 1.0, out: Array | None = None) -> Array:
        """factor * x + alpha * y, in the dtype of x. `out`, like x, may be overwritten with the result."""

    def scale(self, x: Array, factor: float, out: Array | None = None) -> Array:
        """factor * x in the dtype of x."""

    def length(self, x: Array) -> Any:
        """The number of elements of x."""

    def concat(self, parts: Sequence[Array]) -> Array:
        """The parts, one after the other, along the first dimension."""

    def join(self, parts: Sequence[Array]) -> Array:
        """(B, sum of widths) matrices side by side."""

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The same elements in another shape."""

    def row_max(self, x: Array, least: int) -> Array:
        """(B, 1) the largest integer of every row, or `least` if that is larger."""

    def pad(self, x: Array, length: int, fill: float) -> Array:
        """x, lengthened to `length` elements by `fill`."""

    def top_abs(self, x: Array, k: int) -> Array:
        """(k,) ascending indices of the largest magnitudes; NaN counts as the largest. Of a matrix (B, m): (B, k)."""

    def above(self, x: Array, threshold: Any) -> Array:
        """Ascending indices where not |x| <= threshold: the larger ones, and NaN, so that NaN is never overlooked."""

    def largest(self, x: Array, indices: Array, k: int) -> Array:
        """At most k of the ascending `indices` into x, those of the largest |x|, ascending."""

    def blocks(self, indices: Array, values: Array, num_blocks: int, size: int, quota: int) -> tuple[Array, Array]:
        """Entries by block of `size` elements: of every block the `quota` largest values. Indices are ascending.

        Returns:
            (num_blocks, quota) ascending indices that count from the block's start, padded with `size`, and the values,
            padded with 0.
        """

    def positions(self, mask: Array) -> Array:
        """Ascending indices of what is true."""

    def distinct(self, indices: Array, n: int) -> Array:
        """The ascending distinct indices below n."""

    def marks(self, n: int, indices: Array) -> Array:
        """(n,) boolean: which indices occur, in whatever order and however often.

        The result may reuse the memory of this object's previous result of that length.
        """

    def kth_largest(self, x: Array, k: int) -> Any:
        """The k-th largest |x| (1 <= k <= n) as a scalar; NaN counts as the largest."""

    def gather(self, x: Array, indices: Array) -> Array:
        """(k,) x[indices]."""

    def scatter_sum(self, n: int, blocks: Sequence[tuple[Array, Array]], onto: Array | None = None) -> Array:
        """(n,) sum of (indices, values) blocks, added in the order given: equal bits on every rank.

        `onto`: at most n elements that the sum begins with, instead of zeros.

        Index n is padding, which is dropped. Values of a repeated index inside one block add up in whatever order, so
        that ranks may then differ in the last bits. The result may reuse the memory of this object's previous result.
        """

    def clear(self, x: Array, indices: Array) -> Array:
        """x with zeros at the indices. May reuse x's memory: rebind the result."""

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        """x with the values at the unique indices. May reuse x's memory: rebind the result."""

    def searchsorted(self, ascending: Array, edges: Array) -> Array:
        """For each edge the number of elements of `ascending` that are less than it."""

    def wrapped_range(self, start: Any, count: int, n: int, like: Array) -> Array:
        """(count,) indices start, start + 1, ... modulo n."""

    def runs(self, x: Array, shift: Any, starts: Sequence[int], count: int, stride: int) -> Array:
        """(len(starts) * count,) from each start plus `shift` on, `count` elements of x that are `stride` apart."""

    def residues(self, n: int, coefficients: Sequence[int], like: Array) -> Array:
        """(n,) int32: a polynomial at 0, 1, .. n - 1 modulo PRIME, a hash. Coefficients: of the highest power first."""

    def transpose(self, matrix: Array) -> Array:
        """(m, B) of a matrix (B, m)."""

    def orthonormal(self, matrix: Array) -> Array:
        """(B, m) orthonormal columns, of which those of a matrix (B, m), m <= B, are combinations.

        They are m even if the matrix has fewer that are independent, and not finite if the matrix is not.
        """

    def bits(self, values: Array) -> Array:
        """float32 values viewed as int32, bit for bit: for the wire."""

    def floats(self, bits: Array) -> Array:
        """The inverse of `bits`."""

    def halves(self, values: Array) -> Array:
        """(B, m / 2) int32: a matrix (B, m) rounded to float16, two to a word. m is even."""

    def from_halves(self, words: Array) -> Array:
        """The inverse of `halves`, as float32."""

    def shorts(self, integers: Array) -> Array:
        """(B, m / 2) int32: a matrix (B, m) of integers in [0, 65536), two to a word. m is even."""

    def from_shorts(self, words: Array) -> Array:
        """The inverse of `shorts`, as int32."""

    def as_int32(self, indices: Array) -> Array:
        """Indices as int32: for the wire."""

    def as_int64(self, indices: Array) -> Array:
        """Indices as int64: for sums of them."""

    def all_finite(self, x: Array) -> Any:
        """0-d boolean. A vector whose float32 sum overflows counts as not finite: one pass is the price of a look."""

    def maximum(self, x: Array, y: Array) -> Array:
        """The elementwise maximum."""

    def minimum(self, x: Array, y: Array) -> Array:
        """The elementwise minimum."""

    def cond(self, predicate: Any, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
        """What `yes` or `no` returns, by a 0-d boolean; only that one is called, or runs in a graph."""

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """x or y by a 0-d boolean: arrays, or dictionaries of arrays and numbers that have the same keys."""

    def clip(self, value: Any, low: float, high: float) -> Any:
        """A scalar, limited to [low, high]. Any of the three may be a number or a 0-d array."""

    def norm_squared(self, x: Array) -> Any:
        """Sum of squares, a scalar of float32 or better."""
