"""Fashion-MNIST with Horovod, Keras 3 and sparse gradients.

    horovodrun -np 2 python examples/tensorflow2_keras_fashion_mnist.py                  # what the network can take
    horovodrun -np 2 python examples/tensorflow2_keras_fashion_mnist.py --density 0.01   # 1 % of the gradient entries
    horovodrun -np 2 python examples/tensorflow2_keras_fashion_mnist.py --dense          # everything, to compare
    python examples/tensorflow2_keras_fashion_mnist.py                                   # one process

A Horovod script for Keras in its usual shape: compile, callbacks, fit. What differs from one without hvd_sparse is the
import and the `compression`, and that ranks are really synchronised: Horovod 0.28.1 trains Keras 3 models on every rank
alone.
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
from results import save

import hvd_sparse.tensorflow.keras as hvd  # was: import horovod.tensorflow.keras as hvd
from hvd_sparse.memories.momentum import Momentum


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--density", type=float, help="share of the gradient entries that is sent (default: it follows the network)")
    add("--sparsifier", default="threshold", help="which entries: threshold, topk, random_block (%(default)s)")
    add("--memory", default="momentum", help="what becomes of the others: momentum, residual, none (%(default)s)")
    add("--dense", action="store_true", help="send every entry")
    add("--epochs", type=int, default=3, help="(%(default)s)")
    add("--steps", type=int, help="steps of an epoch, for a short run")
    add("--batch-size", type=int, default=64, help="per rank (%(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of one rank; multiplied by their number (%(default)s)")
    add("--momentum", type=float, default=0.9, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of the data (%(default)s)")
    add("--data", type=Path, default=FASHION_MNIST, metavar="DIR", help="folder of the IDX files (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    return parser.parse_args()


def load(split, directory):
    images, labels = fashion_mnist(split, directory)
    images = (images.reshape(len(images), -1).astype(np.float32) / 255 - 0.2860) / 0.3530
    return images, labels.astype(np.int64)


def make_batches(images, labels, args):
    """This rank's share of the training data: equally many batches on every rank."""
    share = len(images) // hvd.size()
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    order = np.random.default_rng(args.seed).permutation(len(images))[mine]
    dataset = tf.data.Dataset.from_tensor_slices((images[order], labels[order]))
    return dataset.shuffle(share, seed=args.seed).batch(args.batch_size, drop_remainder=True).prefetch(2)


def make_optimizer(args, num_steps):
    """SGD, wrapped: gradients are averaged over ranks, sparsely unless --dense."""
    momentum, compression = args.momentum, hvd.Compression.none
    if not args.dense:
        memory = args.memory
        if memory == "momentum":  # it applies the momentum, and before it selects: the optimizer must not do it again
            memory, momentum = Momentum(args.momentum), 0.0
        if args.density is None:
            compression = hvd.Compression.adaptive(sparsifier=args.sparsifier, memory=memory)
        else:
            compression = hvd.Compression.sparse(args.density, sparsifier=args.sparsifier, memory=memory)
    # From the rate of one rank to that of all of them, then down to zero at the last step.
    rate = keras.optimizers.schedules.CosineDecay(
        args.lr, num_steps, warmup_target=args.lr * hvd.size(), warmup_steps=min(100, num_steps // 2)
    )
    return hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=momentum), compression=compression)


def main():
    args = parse_arguments()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share the machine's cores
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    try:
        (images, labels), test_set = load("train", args.data), load("test", args.data)
    except DataError as error:
        sys.exit(f"error: {error}")
    batches = make_batches(images, labels, args)
    steps = min(len(batches), args.steps or sys.maxsize)
    if not steps:
        sys.exit(f"error: {len(images)} images are less than one batch of {args.batch_size} for every rank.")

    keras.utils.set_random_seed(args.seed)
    model = keras.Sequential(
        [
            keras.layers.Input((784,)),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = make_optimizer(args, args.epochs * steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    started = time.perf_counter()
    history = model.fit(
        batches.repeat(),
        epochs=args.epochs,
        steps_per_epoch=steps,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ],
        shuffle=False,
        verbose=2 if hvd.rank() == 0 else 0,
    ).history
    seconds = time.perf_counter() - started
    if hvd.rank() != 0:
        return
    test_loss, accuracy = model.evaluate(*test_set, batch_size=1000, verbose=0)
    metrics, num_steps = optimizer.metrics(), args.epochs * steps
    dense = 8 * sum(int(np.prod(v.shape)) for v in model.trainable_variables) * (hvd.size() - 1) / hvd.size()
    sent = metrics["bytes_sent"] / num_steps
    results = {
        "mode": "dense"
        if args.dense
        else f"sparse, density {args.density or 'adaptive'}, {args.sparsifier}, {args.memory}",
        "ranks": hvd.size(),
        "steps": num_steps,
        "test_accuracy": accuracy,
        "test_loss": test_loss,
        "seconds": seconds,
        "bytes_per_step": sent,
        "dense_bytes_per_step": dense,
        "tests": [{"step": num_steps, "loss": test_loss, "accuracy": accuracy}],
        "training_loss": history["loss"],
    }
    share = f" ({sent / dense:.2%} of dense)" if dense else ""
    for name, value in (
        ("exchange", results["mode"]),
        ("ranks", hvd.size()),
        ("steps", num_steps),
        ("test accuracy", f"{accuracy:.2%}"),
        ("seconds of training", f"{seconds:.1f}"),
        ("sent per step and rank", f"{sent / 1e6:.3f} MB{share}"),
    ):
        print(f"{name:<24}{value}", flush=True)
    save(args.json, results)


if __name__ == "__main__":
    main()
