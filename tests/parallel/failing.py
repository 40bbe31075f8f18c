"""One rank of a job that goes wrong in the way named by the first argument. See test_failures.py."""

from __future__ import annotations

import os
import signal
import sys
import time

from scenario import batches, loss_of, make_model, sgd, train

import hvd_sparse.torch as hvd

hvd.init()
way, last = sys.argv[1], hvd.rank() == hvd.size() - 1
model = make_model()
compression = hvd.Compression.sparse(density=0.25, min_size=1, timeout_seconds=8)
optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression)
train(model, optimizer, batches(3))
started = time.monotonic()
try:
    if last and way == "raise":
        raise KeyError("no such column")
    if last and way == "raise in backward":
        optimizer.zero_grad()
        loss = loss_of(model, next(batches(1)))
        model[0].weight.register_hook(lambda _: 1 / 0)
        loss.backward()
    if last and way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if last and way == "kill in exchange":  # its entries are on the way, of the sums it sends none
        submit = optimizer.averager.driver._submit
        optimizer.averager.driver._submit = lambda request, name: (
            os.kill(os.getpid(), signal.SIGKILL) if ".sums." in name else submit(request, name)
        )
    if last and way == "leave":
        sys.exit(0)
    if last and way == "stall":
        time.sleep(30)
    train(model, optimizer, batches(3))
except hvd.HvdSparseError as error:
    print(f"rank {hvd.rank()} ended after {time.monotonic() - started:.1f} s: {error}", flush=True)
    raise
