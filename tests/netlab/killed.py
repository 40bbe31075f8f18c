"""killed.py FOLDER: every rank is refused `hierarchical`, and trains until another one is gone. See test_training.py.

What a rank has to say goes into a file: horovodrun cuts the connections to all ranks when one ends. Those of the first
host get a SIGTERM, which is ignored, so that they end by themselves or not at all.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from scenario import batches, make_model, sgd, train

import hvd_sparse.torch as hvd

signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
rank = hvd.rank()
model = make_model()


def wrapped(**settings: str) -> object:
    compression = hvd.Compression.sparse(0.25, min_size=1, timeout_seconds=30, **settings)
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression)


def say(what: str) -> None:
    file = Path(sys.argv[1], str(rank))
    file.write_text(file.read_text() + what if file.exists() else what)


try:
    wrapped(collective="hierarchical")
except ValueError as error:
    say(f"refused: {error}\n")
optimizer = wrapped()
train(model, optimizer, batches(3))
say("trains\n")
started = time.monotonic()
try:
    while time.monotonic() - started < 90:
        train(model, optimizer, batches(1))
except hvd.HvdSparseError as error:
    say(f"ended: {error}\n")
    raise
