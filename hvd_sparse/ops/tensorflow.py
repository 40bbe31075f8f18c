"""TensorFlow, eagerly and while a graph is traced.

Nothing here looks at data from Python, so lengths may be unknown while tracing. Magnitudes are compared as the integers
that their bits spell: that order is the same, puts NaN above infinity, and is not touched by TensorFlow's graph
optimiser, which rewrites not(|x| <= t) to |x| > t and so loses NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import tensorflow as tf

from hvd_sparse.ops.base import PRIME
from hvd_sparse.types import Array

_INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int64}  # by size of the floating-point type in bytes


class TensorFlowOps:
    """See `Ops`. Indices are int32. Equal magnitudes: the lowest index wins. `out=` is not used.

    State arrays may be tensors or `tf.Variable`s; results are always tensors, to be assigned as a whole. (Scattering
    into a variable would make TensorFlow copy it at every later read: dearer than what it saves.)
    """

    name = "tensorflow"

    def zeros(self, n: Any, like: Array | None = None) -> Array:
        return tf.zeros([n], tf.float32)

    def integers(self, values: Sequence[int], like: Array) -> Array:
        if all(isinstance(value, int) for value in values):
            return tf.constant(values, tf.int32)
        return tf.stack([tf.cast(value, tf.int32) for value in values])

    def add(self, x: Array, y: Array, alpha: float = 1.0, out: Array | None = None) -> Array:
        y = tf.cast(y, x.dtype)
        plain = isinstance(alpha, (int, float)) and alpha == 1
        return x + (y if plain else y * tf.cast(alpha, x.dtype))

    def blend(self, x: Array, factor: float, y: Array, alpha: float = 1.0, out: Array | None = None) -> Array:
        return self.add(self.scale(x, factor), y, alpha)

    def scale(self, x: Array, factor: float, out: Array | None = None) -> Array:
        return x * tf.cast(factor, x.dtype)

    def length(self, x: Array) -> Any:
        return tf.shape(x)[0] if x.shape[0] is None else x.shape[0]

    def concat(self, parts: Sequence[Array]) -> Array:
        return tf.concat(list(parts), 0)

    def join(self, parts: Sequence[Array]) -> Array:
        return tf.concat(list(parts), 1)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return tf.reshape(x, shape)

    def row_max(self, x: Array, least: int) -> Array:
        return tf.maximum(tf.reduce_max(x, axis=1, keepdims=True), least)

    def pad(self, x: Array, length: int, fill: float) -> Array:
        if x.shape[0] == length:
            return x
        padded = tf.pad(x, [[0, length - tf.shape(x)[0]]], constant_values=tf.cast(fill, x.dtype))
        return tf.ensure_shape(padded, [length])

    def top_abs(self, x: Array, k: int) -> Array:
        places = _largest_of_rows(_magnitude(x if x.shape.rank == 2 else x[tf.newaxis]), k)
        return tf.reshape(places % tf.shape(x)[-1], [*x.shape[:-1], k])

    def above(self, x: Array, threshold: Any) -> Array:
        return _positions(_magnitude(x) > _bits(tf.cast(threshold, x.dtype)))

    def largest(self, x: Array, indices: Array, k: int) -> Array:
        def trimmed() -> Array:
            return tf.gather(indices, _largest_of_rows(_magnitude(tf.gather(x, indices))[tf.newaxis], k))

        surplus = self.length(indices) > k
        if tf.is_tensor(surplus):
            return tf.cond(surplus, trimmed, lambda: indices)
        return trimmed() if surplus else indices

    def blocks(self, indices: Array, values: Array, num_blocks: int, size: int, quota: int) -> tuple[Array, Array]:
        edges = tf.searchsorted(indices, tf.range(num_blocks + 1, dtype=indices.dtype) * size)
        rows = tf.RaggedTensor.from_row_splits(_magnitude(values), edges, validate=False).to_tensor(-1)
        rows = tf.pad(rows, [[0, 0], [0, tf.maximum(quota - tf.shape(rows)[1], 0)]], constant_values=-1)
        kept, width = _largest_of_rows(rows, quota), tf.shape(rows)[1]
        block = kept // width
        taken = tf.gather(edges, block) + kept % width
        slots = block * quota + tf.range(tf.size(kept)) - tf.searchsorted(block, block)
        starts = _spread(slots, tf.gather(indices, taken) - block * size, num_blocks * quota, size)
        sent = _spread(slots, tf.gather(values, taken), num_blocks * quota, 0)
        return tf.reshape(starts, [num_blocks, quota]), tf.reshape(sent, [num_blocks, quota])

    def positions(self, mask: Array) -> Array:
        return _positions(mask)

    def distinct(self, indices: Array, n: int) -> Array:
        return _positions(_spread(indices, True, n + 1, False)[:n])

    def marks(self, n: int, indices: Array) -> Array:
        return _spread(indices, True, n, False)

    def kth_largest(self, x: Array, k: int) -> Any:
        """As float64, in which a threshold can be scaled with the accuracy of a Python float."""
        bits = tf.minimum(_kth_largest(_magnitude(x), k), _bits(tf.constant(float("inf"), x.dtype)))
        return tf.cast(tf.bitcast(bits, x.dtype), tf.float64)

    def gather(self, x: Array, indices: Array) -> Array:
        return tf.gather(x, indices)

    def scatter_sum(self, n: int, blocks: Sequence[tuple[Array, Array]], onto: Array | None = None) -> Array:
        dtype = blocks[0][1].dtype
        total = tf.zeros([n + 1], dtype)
        if onto is not None:
            total = tf.concat([onto, tf.zeros([n + 1 - onto.shape[0]], dtype)], 0)
        if _has_gpu():  # one block at a time: a GPU adds the values of one call in any order
            for indices, values in blocks:
                total += tf.scatter_nd(indices[:, tf.newaxis], values, [n + 1])
        else:  # one loop over all entries, in order: three to eight times as fast as scatter_nd
            indices = tf.concat([indices for indices, _ in blocks], 0)
            values = tf.concat([values for _, values in blocks], 0)
            total = tf.raw_ops.SparseTensorDenseAdd(
                a_indices=indices[:, tf.newaxis], a_values=values, a_shape=[n + 1], b=total
            )
        return total[:n]

    def clear(self, x: Array, indices: Array) -> Array:
        # A mask: less than half the price of tensor_scatter_nd_update or tf.where.
        return tf.math.multiply_no_nan(x, _spread(indices, tf.zeros([], x.dtype), self.length(x), 1))

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_update(x, indices[:, tf.newaxis], values)

    def searchsorted(self, ascending: Array, edges: Array) -> Array:
        return tf.searchsorted(ascending, tf.cast(edges, ascending.dtype))

    def wrapped_range(self, start: Any, count: int, n: int, like: Array) -> Array:
        indices = tf.cast(start, tf.int64) % n + tf.range(count, dtype=tf.int64)
        return tf.cast(tf.where(indices < n, indices, indices - n), tf.int32)

    def runs(self, x: Array, shift: Any, starts: Sequence[int], count: int, stride: int) -> Array:
        first = tf.cast(shift, tf.int32) + tf.constant(starts, tf.int32)
        return tf.gather(x, tf.reshape(first[:, tf.newaxis] + tf.range(count) * stride, [-1]))

    def residues(self, n: int, coefficients: Sequence[int], like: Array) -> Array:
        places = tf.range(n, dtype=tf.int64)
        return tf.cast(reduce(lambda value, c: (value * places + c) % PRIME, coefficients, 0 * places), tf.int32)

    def transpose(self, matrix: Array) -> Array:
        return tf.transpose(matrix)

    def orthonormal(self, matrix: Array) -> Array:
        return tf.linalg.qr(matrix).q

    def bits(self, values: Array) -> Array:
        return tf.bitcast(tf.cast(values, tf.float32), tf.int32)

    def floats(self, bits: Array) -> Array:
        return tf.bitcast(bits, tf.float32)

    def halves(self, values: Array) -> Array:
        return _in_pairs(tf.cast(values, tf.float16))

    def from_halves(self, words: Array) -> Array:
        return tf.cast(tf.reshape(tf.bitcast(words, tf.float16), [-1, 2 * words.shape[1]]), tf.float32)

    def shorts(self, integers: Array) -> Array:
        return _in_pairs(tf.cast(integers, tf.uint16))

    def from_shorts(self, words: Array) -> Array:
        return tf.cast(tf.reshape(tf.bitcast(words, tf.uint16), [-1, 2 * words.shape[1]]), tf.int32)

    def as_int32(self, indices: Array) -> Array:
        return tf.cast(indices, tf.int32)

    def as_int64(self, indices: Array) -> Array:
        return tf.cast(indices, tf.int64)

    def all_finite(self, x: Array) -> Any:
        return tf.math.is_finite(tf.reduce_sum(x))

    def maximum(self, x: Array, y: Array) -> Array:
        return tf.maximum(x, y)

    def minimum(self, x: Array, y: Array) -> Array:
        return tf.minimum(x, y)

    def cond(self, predicate: Any, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
        return tf.cond(predicate, yes, no)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        pairs = [_alike(one, other) for one, other in zip(tf.nest.flatten(x), tf.nest.flatten(y))]
        if not pairs:
            return x
        # A branch hands its tensors on, tf.where would copy them.
        chosen = tf.cond(condition, lambda: [one for one, _ in pairs], lambda: [other for _, other in pairs])
        return tf.nest.pack_sequence_as(x, tf.nest.flatten(chosen))

    def clip(self, value: Any, low: float, high: float) -> Any:
        if not any(map(tf.is_tensor, (value, low, high))):
            return min(max(value, low), high)
        if isinstance(low, float) and tf.is_tensor(value) and value.dtype.is_integer:
            value = tf.cast(value, tf.float64)
        return tf.minimum(tf.maximum(value, low), high)

    def norm_squared(self, x: Array) -> Any:
        return 2 * tf.nn.l2_loss(x)


def _bits(x: Array) -> Array:
    return tf.bitcast(x, _INTEGERS[x.dtype.size])


def _magnitude(x: Array) -> Array:
    """|x| as integers of the same order. NaN is the largest."""
    return _bits(tf.abs(x))


def _positions(mask: Array) -> Array:
    return tf.cast(tf.reshape(tf.where(tf.reshape(mask, [-1])), [-1]), tf.int32)


def _kth_largest(magnitude: Array, k: int) -> Array:
    """Of the last dimension."""
    if _has_gpu():  # where NthElement does not exist
        return tf.reduce_min(tf.math.top_k(magnitude, k, sorted=False).values, axis=-1)
    return tf.raw_ops.NthElement(input=magnitude, n=tf.shape(magnitude)[-1] - k)  # one third of the time of top_k


def _largest_of_rows(magnitude: Array, k: int) -> Array:
    """The k largest of every row of a matrix: their places in the flattened matrix. Negative numbers do not count."""
    limit, num_rows, width = _kth_largest(magnitude, k), tf.shape(magnitude)[0], tf.shape(magnitude)[1]
    found = _positions(magnitude >= tf.maximum(limit, 0)[:, tf.newaxis])
    row = found // width
    larger = tf.gather(tf.reshape(magnitude, [-1]), found) > tf.gather(limit, row)
    equal = tf.cast(~larger, tf.int32)
    num_equal = tf.math.unsorted_segment_sum(equal, row, num_rows)
    num_larger = tf.math.unsorted_segment_sum(1 - equal, row, num_rows)
    place = tf.cumsum(equal) - tf.gather(tf.cumsum(num_equal, exclusive=True), row)  # among those of the row
    return tf.boolean_mask(found, larger | (place <= tf.gather(k - num_larger, row)))


def _spread(indices: Array, values: Any, n: int, fill: Any) -> Array:
    """(n,) the values at the indices, `fill` elsewhere."""
    values = tf.convert_to_tensor(values)
    return tf.raw_ops.SparseToDense(
        sparse_indices=indices,
        output_shape=tf.cast(tf.stack([n]), indices.dtype),
        sparse_values=values,
        default_value=tf.cast(fill, values.dtype),
        validate_indices=False,
    )


def _in_pairs(matrix: Array) -> Array:
    """Two 16-bit elements to an int32."""
    return tf.bitcast(tf.reshape(matrix, [-1, matrix.shape[1] // 2, 2]), tf.int32)


def _alike(one: Any, other: Any) -> tuple[Array, Array]:
    """Both as tensors of one type. A state may begin with plain numbers; a Python float is as good as a float64."""
    dtype = next((value.dtype for value in (one, other) if hasattr(value, "dtype")), None)
    if dtype is None:
        dtype = tf.float64 if isinstance(one, float) else tf.int32
    return tf.cast(one, dtype), tf.cast(other, dtype)


def _has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))
