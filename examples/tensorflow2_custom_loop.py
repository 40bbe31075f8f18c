"""A training loop of one's own with Horovod, TensorFlow and sparse gradients, on Fashion-MNIST.

    horovodrun -np 2 python examples/tensorflow2_custom_loop.py --steps 200
    python examples/tensorflow2_custom_loop.py --steps 200                        # one process

The tape averages gradients over ranks; the optimizer is a plain one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from datasets import FASHION_MNIST, DataError, fashion_mnist

import hvd_sparse.tensorflow as hvd  # was: import horovod.tensorflow as hvd


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--density", type=float, help="share of the gradient entries that is sent (default: it follows the network)")
    add("--steps", type=int, default=400, help="(%(default)s)")
    add("--batch-size", type=int, default=64, help="per rank (%(default)s)")
    add("--lr", type=float, default=0.001, help="of Adam (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--data", type=Path, default=FASHION_MNIST, metavar="DIR", help="folder of the IDX files (%(default)s)")
    return parser.parse_args()


def main():
    args = parse_arguments()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share the machine's cores
    try:
        (images, labels), (test_images, test_labels) = (fashion_mnist(split, args.data) for split in ("train", "test"))
    except DataError as error:
        sys.exit(f"error: {error}")
    images, test_images = (a.reshape(len(a), -1).astype(np.float32) / 255 for a in (images, test_images))

    keras.utils.set_random_seed(args.seed)
    model = keras.Sequential(
        [keras.layers.Input((784,)), keras.layers.Dense(512, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam(args.lr)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compression = hvd.Compression.adaptive() if args.density is None else hvd.Compression.sparse(args.density)
    hvd.broadcast_model(model, optimizer, root_rank=0)

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    # Every rank draws from its own share.
    mine = np.arange(hvd.rank(), len(images), hvd.size())
    generator = np.random.default_rng([args.seed, hvd.rank()])
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        chosen = generator.choice(mine, args.batch_size)
        loss = train_step(tf.constant(images[chosen]), tf.constant(labels[chosen].astype(np.int64)))
        if hvd.rank() == 0 and (step % 100 == 0 or step == args.steps):
            print(
                f"step {step} of {args.steps}: {time.perf_counter() - started:.1f} s, loss {float(loss):.3f}",
                flush=True,
            )
    if hvd.rank() == 0:
        scores = model(tf.constant(test_images)).numpy()
        print(f"{'test accuracy':<24}{(scores.argmax(1) == test_labels).mean():.2%}", flush=True)


if __name__ == "__main__":
    main()
