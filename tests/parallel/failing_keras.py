"""One rank of a Keras job that goes wrong in the way named by the first argument. See test_failures.py."""

from __future__ import annotations

import logging
import sys
import time

import keras
from keras_scenario import BATCH, data, loss, make_model

import hvd_sparse.tensorflow.keras as hvd

logging.basicConfig()
hvd.init()
way, rank, last = sys.argv[1], hvd.rank(), hvd.rank() == hvd.size() - 1
model = make_model()
compression = hvd.Compression.sparse(density=0.25, min_size=1, timeout_seconds=6)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression), loss())
x, y = data(4)
model.fit(x, y, batch_size=BATCH, verbose=0)
if last and way == "stall":
    time.sleep(40)
if last and way == "raise":
    raise KeyError("no such column")
started = time.monotonic()
try:
    model.fit(x, y, batch_size=BATCH, verbose=0)
except Exception as error:
    print(f"rank {rank} ended after {time.monotonic() - started:.1f} s: {type(error).__name__}", flush=True)
    raise
