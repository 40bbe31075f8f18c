"""elastic_keras.py FOLDER: `fit` goes on while ranks come and go. See test_elastic.py.

Rank 0 kills itself two batches after the second commit. The job ends three commits after a third rank has come again.
A host's file tells what it has seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
from keras_scenario import BATCH, data, flat, loss, make_model

import hvd_sparse.tensorflow.keras as hvd

hvd.init()
host = os.environ["HOROVOD_HOSTNAME"]
model = make_model(seed=int(host.rpartition(".")[2]))  # another one on each host, until the first sync
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.sparse(0.1, min_size=1))
model.compile(optimizer, loss())


def say(what: str) -> None:
    metrics = optimizer.metrics()
    told = {
        "what": what, "time": time.monotonic(), "rank": hvd.rank(), "sizes": state.sizes,
        "model": flat(model).tobytes().hex(), "owed": metrics["residual_norm"], "steps": metrics["num_exchanges"],
    }  # fmt: skip
    with Path(sys.argv[1], host).open("a") as file:
        file.write(json.dumps(told) + "\n")


class Commit(keras.callbacks.Callback):
    """Every four batches."""

    num_batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1
        if state.sizes == [3, 3] and self.num_batches % 4 == 2 and hvd.rank() == 0 and hvd.size() == 3:
            say("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_batches % 4 == 0:
            state.sizes = [*state.sizes, hvd.size()]
            say("commits")
            self.model.stop_training = 2 in state.sizes and state.sizes[-3:] == [3, 3, 3]
            time.sleep(0.1)
            state.commit()


@hvd.elastic.run
def train(state: Any) -> None:
    say("starts")
    model.fit(*data(8), BATCH, epochs=10_000, verbose=0, callbacks=[Commit()])


state = hvd.elastic.KerasState(model, sizes=[])
say("comes")
train(state)
say("ends")
