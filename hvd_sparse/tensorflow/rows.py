"""Row-sparse gradients (`tf.IndexedSlices` of embeddings): the union of rows, without loss."""

from __future__ import annotations

import tensorflow as tf

from hvd_sparse.collectives.requests import AllGather
from hvd_sparse.types import Array, Program, World


def sum_rows(world: World, indices: Array, values: Array, num_rows: int) -> Program[Array]:
    """(num_rows, d) dense sum over ranks of the rows that ranks touched; duplicates are added before they are sent.

    Rows travel as one int32 tensor (rows of this rank, 1 + d); lengths differ between ranks. Dense on arrival: no
    Keras 3 optimizer treats untouched rows differently, and repeated indices would be squared one by one.

    Args:
        indices: (m,) rows, possibly repeated.
        values: (m, d) float32.
        num_rows: of the table.
    """
    width = values.shape[1]
    unique, places = tf.unique(tf.cast(indices, tf.int32))
    merged = tf.math.unsorted_segment_sum(values, places, tf.shape(unique)[0])
    packed = tf.concat([unique[:, tf.newaxis], tf.bitcast(merged, tf.int32)], 1)
    gathered = yield AllGather(packed, tag="rows")
    received = tf.bitcast(gathered[:, 1:], tf.float32)
    total = tf.math.unsorted_segment_sum(received, gathered[:, 0], num_rows)
    return tf.ensure_shape(total, [num_rows, width])
