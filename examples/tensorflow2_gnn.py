"""Node classification with a small graph neural network in plain TensorFlow operations, averaged by a Keras callback.

    horovodrun -np 2 python examples/tensorflow2_gnn.py --steps 200
    horovodrun -np 2 python examples/tensorflow2_gnn.py --steps 200 --every-seconds 2   # by the clock
    horovodrun -np 2 python examples/tensorflow2_gnn.py --steps 200 --synthetic         # needs no data
    python examples/tensorflow2_gnn.py --steps 200                                      # one process, the whole graph

Every rank trains on its part of WordNet (`sudo apt-get install wordnet-base`) alone: `fit` with a plain optimizer. The
callback averages the models, and `fit` ends with the same model on all ranks. Rank 0 then measures the accuracy on the
test nodes of the whole graph. Super parts need pymetis: pip install 'hvd-sparse[gnn]'
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import graph_data
import graph_parts
import keras
import numpy as np
import tensorflow as tf
from datasets import DataError
from results import save, show

import hvd_sparse.tensorflow.keras as hvd  # was: import horovod.tensorflow.keras as hvd
from hvd_sparse import graph
from hvd_sparse.tensorflow import broadcast_object

FANOUTS = (10, 5)
TRAIN, TEST = 0, 2  # of GraphData.split


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", choices=("random", "super", "min-cut"), default="super", help="how the graph is cut (%(default)s)")
    add("--steps", type=int, default=400, help="of each rank (%(default)s)")
    interval = parser.add_mutually_exclusive_group()
    interval.add_argument("--every-steps", type=int, help="of each rank between averages (50)")
    interval.add_argument("--every-seconds", type=float, help="between averages, instead")
    add("--batch-size", type=int, default=256, help="per rank (%(default)s)")
    add("--hidden", type=int, default=64, help="width of the network (%(default)s)")
    add("--lr", type=float, default=0.005, help="learning rate of Adam (%(default)s)")
    add("--seed", type=int, default=0, help="of partition, initial weights and order of the data (%(default)s)")
    add("--data", type=Path, default=graph_data.WORDNET, metavar="DIR", help="folder of WordNet (%(default)s)")
    add("--synthetic", action="store_true", help="a small graph with communities instead")
    add("--cache", type=Path, default=graph_parts.CACHE, metavar="DIR", help="where parts are written (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    if min(args.steps, args.batch_size, args.hidden) < 1:
        parser.error("--steps, --batch-size and --hidden must be 1 or more")
    if args.every_steps is None and args.every_seconds is None:
        args.every_steps = 50
    return args


class Sage(keras.layers.Layer):
    """The mean of what neighbours say, and what a node says itself: GraphSAGE, in gathers and segment means."""

    def __init__(self, width):
        super().__init__()
        self.own, self.neighbours = keras.layers.Dense(width), keras.layers.Dense(width, use_bias=False)

    def call(self, x, src, dst):
        # The mean of products is the product of the mean, and narrow rows are gathered faster than wide ones.
        said = tf.gather(self.neighbours(x), src)
        return self.own(x) + tf.math.unsorted_segment_mean(said, dst, tf.shape(x)[0])


class Classifier(keras.Model):
    """Scores of all classes, at the nodes `wanted` of a sampled neighbourhood."""

    def __init__(self, hidden, num_classes):
        super().__init__()
        self.first, self.second = Sage(hidden), Sage(hidden)
        self.scores = keras.layers.Dense(num_classes)

    def call(self, inputs):
        x, src, dst, wanted = (inputs[name] for name in ("x", "src", "dst", "wanted"))
        hidden = tf.nn.relu(self.first(x, src, dst))
        hidden = tf.nn.relu(self.second(hidden, src, dst))
        return self.scores(tf.gather(hidden, wanted))


def make_batches(part, batch_size, seed):
    """Without end: sampled neighbourhoods of training nodes with a known class, of different sizes, and the classes."""
    x, y = part.arrays["x"], part.arrays["y"]
    nodes = np.flatnonzero((part.arrays["split"] == TRAIN) & (y >= 0))
    if not len(nodes):
        raise DataError(f"The part of rank {hvd.rank()} has no training nodes: start fewer ranks.")
    sampler = graph.NeighborSampler(part.graph, FANOUTS, seed)

    def generate():
        epoch = 0
        while True:
            for batch in sampler.batches(nodes, batch_size, epoch):
                wanted = np.arange(batch.num_seeds)
                inputs = {"x": x[batch.nodes], "src": batch.edge_src, "dst": batch.edge_dst, "wanted": wanted}
                yield inputs, y[batch.nodes[wanted]]
            epoch += 1

    numbers = tf.TensorSpec([None], tf.int64)
    inputs = {"x": tf.TensorSpec([None, x.shape[1]]), "src": numbers, "dst": numbers, "wanted": numbers}
    return tf.data.Dataset.from_generator(generate, output_signature=(inputs, numbers)).prefetch(2)


def measure(model, data):
    """Accuracy on the test nodes of the whole graph."""
    nodes = np.flatnonzero((data.split == TEST) & (data.y >= 0))
    src, dst = (tf.constant(ends) for ends in data.graph.to_edges())
    scores = model({"x": tf.constant(data.x), "src": src, "dst": dst, "wanted": tf.constant(nodes)})
    return float((scores.numpy().argmax(1) == data.y[nodes]).mean())


def main():
    args = parse_arguments()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share the machine's cores
    data, facts = None, None
    try:
        if hvd.rank() == 0:
            data = graph_data.synthetic() if args.synthetic else graph_data.wordnet(args.data)
            partition = "whole" if hvd.size() == 1 else args.parts
            facts = graph_parts.write(data, data.graph, partition, hvd.size(), args.seed, args.cache)
        facts = broadcast_object(facts, root_rank=0, name="facts")
        part = graph_parts.open_own(facts, hvd.rank())
        batches = make_batches(part, args.batch_size, args.seed * hvd.size() + hvd.rank())
    except DataError as error:
        sys.exit(f"error: {error}")

    keras.utils.set_random_seed(args.seed)
    model = Classifier(args.hidden, facts["num_classes"])
    model(next(iter(batches))[0])  # creates the variables
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Batches differ in size, and XLA would compile the model for each.
    model.compile(keras.optimizers.Adam(args.lr), loss, metrics=["accuracy"], jit_compile=False)
    averaging = hvd.PeriodicAveragingCallback(every_steps=args.every_steps, every_seconds=args.every_seconds)
    started = time.perf_counter()
    verbose = (1 if sys.stdout.isatty() else 2) if hvd.rank() == 0 else 0
    model.fit(batches, steps_per_epoch=args.steps, callbacks=[averaging], shuffle=False, verbose=verbose)
    seconds = time.perf_counter() - started
    if hvd.rank() != 0:
        return
    metrics = averaging.metrics()
    results = {
        "ranks": hvd.size(),
        "steps": args.steps,
        "seconds": seconds,
        "rounds": metrics["num_rounds"],
        "waiting_share": metrics["waiting_seconds"] / seconds,
        "bytes_per_rank": metrics["bytes_sent"],
        "accuracy": measure(model, data),
    }
    rows = {
        "ranks": hvd.size(),
        "steps of each rank": args.steps,
        "edges within parts": f"{facts['kept_edges']:.1%}",
        "seconds of training": f"{seconds:.1f}",
        "averages of the model": results["rounds"],
        "waiting": f"{results['waiting_share']:.2%} of the time",
        "sent per rank": f"{results['bytes_per_rank'] / 1e6:.3f} MB",
        "test accuracy": f"{results['accuracy']:.2%}",
    }
    show(rows)
    save(args.json, results)


if __name__ == "__main__":
    main()
