"""elastic.py FOLDER: two models are trained while ranks come and go. See test_elastic.py.

One is averaged every four steps, the other has sparse gradients in each step. Rank 0 kills itself two steps after the
fourth round. The job ends three rounds after a fourth rank has come again. A host's file tells what it has seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from scenario import assert_same_on_ranks, batches, flat, loss_of, make_model, sgd

import hvd_sparse.torch as hvd

hvd.init()
host = os.environ["HOROVOD_HOSTNAME"]
own = make_model(seed=int(host.rpartition(".")[2]))  # another one on each host, until the first sync
optimizer = hvd.PeriodicAveraging(sgd(own), own, every_steps=4, outer=hvd.OuterSGD())
shared = make_model()
compression = hvd.Compression.sparse(0.1, min_size=1, sparsifier="topk", collective="allgather")
sparse = hvd.DistributedOptimizer(sgd(shared), shared.named_parameters(), compression)


def digest(model: torch.nn.Module) -> str:
    return flat(model).numpy().tobytes().hex()


def say(what: str, **more: Any) -> None:
    told = {
        "what": what, "time": time.monotonic(), "rank": hvd.rank(), "sizes": state.sizes, "own": digest(own),
        "shared": digest(shared), "owed": sparse.metrics()["residual_norm"], **more,
    }  # fmt: skip
    with Path(sys.argv[1], host).open("a") as file:
        file.write(json.dumps(told) + "\n")


@hvd.elastic.run
def train(state: Any) -> None:
    say("starts")
    assert_same_on_ranks(flat(own))
    assert_same_on_ranks(flat(shared))
    for step, batch in enumerate(batches(10_000), 1):
        if len(state.sizes) == 4 and step % 4 == 3 and hvd.rank() == 0 and hvd.size() == 4:
            say("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        for model, its_optimizer in ((own, optimizer), (shared, sparse)):
            its_optimizer.zero_grad()
            loss_of(model, batch).backward()
            its_optimizer.step()
        time.sleep(0.02)
        if optimizer.just_averaged:
            assert_same_on_ranks(flat(own))
            assert_same_on_ranks(flat(shared))
            state.sizes = [*state.sizes, hvd.size()]
            say("round")
            state.commit()
        if 3 in state.sizes and state.sizes[-3:] == [4, 4, 4]:
            break
    optimizer.finish()
    assert_same_on_ranks(flat(own))


state = hvd.elastic.TorchState(model=own, optimizer=optimizer, shared=shared, sparse=sparse, sizes=[])
say("comes")
train(state)
say("ends")
