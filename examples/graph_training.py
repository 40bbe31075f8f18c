"""What the PyTorch examples on graphs share: arguments, ways to train together, and the loop."""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graph_parts
import torch
from datasets import DataError
from tqdm import tqdm

import hvd_sparse.torch as hvd  # was: import horovod.torch as hvd
from hvd_sparse.graph import Graph

AVERAGING = ("random", "super", "min-cut")  # ways to cut a graph into parts, whose models are averaged now and then
MODES = (*AVERAGING, "sync", "adaptive", "single")
SYNCHRONOUS_PARTS = "super"
AGREE_STEPS = 10  # synchronous ranks have to end at the same step: they ask each other so often


def make_parser(description: str, lr: float, batch_size: int) -> argparse.ArgumentParser:
    """Arguments of all examples on graphs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", choices=MODES, default="super", help="random, super, min-cut: each rank trains on a part of that kind"
        " alone, and models are averaged; sync: gradients are, densely, in every step (super parts); adaptive: so, with"
        " what the network can take; single: one process with the whole graph (%(default)s)")  # fmt: skip
    add("--minutes", type=_positive, help="of training by the clock, without evaluations (2, unless --steps is given)")
    add("--steps", type=_count, help="of each rank instead")
    interval = parser.add_mutually_exclusive_group()
    interval.add_argument("--every-seconds", type=_positive, help="between averages (5)")
    interval.add_argument("--every-steps", type=_count, help="of each rank between averages, instead")
    add("--drop-part", type=int, metavar="PART", help="train without this part, as if its rank had been lost")
    add("--slow", type=_slow_rank, metavar="RANK:SECONDS", help="let this rank sleep in every step")
    add("--batch-size", type=_count, default=batch_size, help="per rank (%(default)s)")
    add("--hidden", type=_count, default=64, help="width of the network (%(default)s)")
    add("--lr", type=_positive, default=lr, help="learning rate of Adam (%(default)s)")
    add("--seed", type=int, default=0, help="of partition, initial weights and order of the data (%(default)s)")
    add("--points", type=_count, default=24, help="models that are evaluated, spread over the run (%(default)s)")
    add("--data", type=Path, metavar="PATH", help="where the graph comes from, see above")
    add("--synthetic", action="store_true", help="a small graph with communities instead")
    add("--cache", type=Path, default=graph_parts.CACHE, metavar="DIR", help="where parts are written (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--plot", type=Path, metavar="PNG", help="draw the metric over time")
    add("--bar", action=argparse.BooleanOptionalAction, help="progress bar (default: if stderr is a terminal)")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments, checked as far as that is possible before Horovod is initialised."""
    args = parser.parse_args(arguments)
    if args.minutes and args.steps:
        parser.error("--minutes or --steps, not both")
    if args.drop_part is not None and args.mode not in AVERAGING:
        parser.error(f"--drop-part needs one of --mode {', '.join(AVERAGING)}. Received: --mode {args.mode}")
    if not args.steps and not args.minutes:
        args.minutes = 2.0
    if not args.every_steps and not args.every_seconds:
        args.every_seconds = 5.0
    return args


def start(args: argparse.Namespace) -> torch.device:
    """Initialise Horovod, and choose this rank's device."""
    hvd.init()
    torch.set_num_threads(1)  # ranks share the machine's cores
    torch.manual_seed(args.seed)
    if args.mode == "single" and hvd.size() > 1:
        sys.exit(f"error: --mode single is for one process: start it without horovodrun. Received: {hvd.size()} ranks.")
    for name, number in (("--drop-part", args.drop_part), ("--slow", args.slow and args.slow[0])):
        if number is not None and not 0 <= number < hvd.size():
            sys.exit(f"error: {name} must name one of 0 to {hvd.size() - 1}. Received: {number}.")
    if args.drop_part is not None and hvd.size() == 1:
        sys.exit("error: --drop-part leaves nothing to train on: start more ranks, with horovodrun -np 4.")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)
    return device


def open_part(args: argparse.Namespace, make: Callable[[], tuple[Any, Any]]) -> tuple[Any, dict[str, Any], Any]:
    """This rank's part, facts about all parts, and on rank 0 the data.

    Args:
        make: the data and the graph to train on; called on rank 0 alone, which writes the parts.

    Raises:
        DataError: from `make`, or the parts cannot be written, read or trained on.
    """
    data, facts = None, {}
    if hvd.rank() == 0:
        data, whole = make()
        partition = args.mode if args.mode in AVERAGING else SYNCHRONOUS_PARTS
        partition = "whole" if hvd.size() == 1 else partition
        facts = graph_parts.write(data, whole, partition, hvd.size(), args.seed, args.cache)
        facts["partition"] = partition
    facts = hvd.broadcast_object(facts, root_rank=0, name="facts")
    part = graph_parts.open_own(facts, hvd.rank(), args.drop_part)
    if not part.graph.num_edges:
        raise DataError(f"The part of rank {hvd.rank()} has no edges: start fewer ranks.")
    return part, facts, data


def sparse_matrix(whole: Graph) -> torch.Tensor:
    """(N, N), with a row for every target: what SAGEConv aggregates with on a whole graph, without a copy per edge."""
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    rows, columns = torch.from_numpy(whole.indptr), torch.from_numpy(whole.indices).long()
    shape, ones = (whole.num_nodes, whole.num_nodes), torch.ones(len(columns))
    return torch.sparse_csr_tensor(rows, columns, ones, shape, check_invariants=False)


def wrap(args: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Adam, which averages models now and then, or gradients in every step, or nothing."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if args.mode in AVERAGING:
        interval = {"every_steps": args.every_steps, "every_seconds": args.every_seconds}
        return hvd.PeriodicAveraging(optimizer, model, **interval)
    if args.mode == "single":
        return optimizer
    compression = hvd.Compression.none if args.mode == "sync" else hvd.Compression.adaptive()
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)


@dataclass
class Training:
    """What one rank has done.

    Attributes:
        seconds: of training; the rank's last wait for the others is in it.
        waiting_share: of the time until its last step: in exchanges, for slower ranks and for the network.
        bytes_sent: to other ranks.
        models: seconds, steps and weights at moments at which all ranks have the same model.
    """

    steps: int
    seconds: float
    waiting_share: float
    bytes_sent: float
    num_rounds: int
    models: list[tuple[float, int, dict[str, torch.Tensor]]]


def train(
    args: argparse.Namespace, model: torch.nn.Module, optimizer: Any, batches: Iterator[Any],
    loss_of: Callable[..., torch.Tensor],
) -> Training:  # fmt: skip
    """Until time or steps are used up. Models are kept for later, so that evaluating them takes no time of training."""
    averaging, synchronous = args.mode in AVERAGING, args.mode in ("sync", "adaptive")
    sleep_seconds = args.slow[1] if args.slow and args.slow[0] == hvd.rank() else 0.0
    is_idle = args.drop_part is not None and hvd.rank() == hvd.size() - 1
    limit = args.steps or 60 * args.minutes
    losses: deque[float] = deque(maxlen=100)
    models, step, waited = [], 0, 0.0
    bar = _Bar(args, limit)

    def keep() -> None:
        weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        models.append((time.perf_counter() - started, step, weights))

    hvd.barrier()
    started = time.perf_counter()
    done = float(is_idle)  # a share of the run
    keep()
    while done < 1:
        batch = next(batches)
        time.sleep(sleep_seconds)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if args.mode == "sync":  # Horovod's own optimizer waits here, or else inside of step
            since = time.perf_counter()
            optimizer.synchronize()
            waited += time.perf_counter() - since
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        step += 1
        losses.append(loss.item())
        done = (step if args.steps else time.perf_counter() - started) / limit
        if synchronous and not args.steps:
            done = _agreed(done, step)
        bar.move(done * limit)
        is_common = optimizer.just_averaged if averaging and hvd.size() > 1 else True
        if is_common and done < 1 and done * args.points >= len(models):
            keep()
            bar.tell(done * limit, step, sum(losses) / len(losses))
    seconds = time.perf_counter() - started
    metrics = optimizer.metrics() if hasattr(optimizer, "metrics") else {}
    waited += metrics.get("waiting_seconds", 0.0) + metrics.get("exposed_seconds", 0.0)
    if averaging:
        optimizer.finish()  # other ranks may have steps to take
        metrics = optimizer.metrics()
    keep()
    bar.close()
    sent = metrics.get("bytes_sent", step * _dense_bytes(model) if args.mode == "sync" else 0)
    share = 0.0 if is_idle else waited / seconds
    return Training(step, time.perf_counter() - started, share, float(sent), metrics.get("num_rounds", 0), models)


def _agreed(done: float, step: int) -> float:
    """Below 1 until all ranks know that time is over for one of them."""
    if step % AGREE_STEPS:
        return min(done, math.nextafter(1.0, 0.0))
    return float(hvd.allreduce(torch.tensor([done], dtype=torch.float64), op=hvd.Max, name="done"))


def _dense_bytes(model: torch.nn.Module) -> float:
    """What a rank sends for a ring allreduce of every gradient."""
    return 8 * sum(p.numel() for p in model.parameters()) * (hvd.size() - 1) / hvd.size()


class _Bar:
    """Progress on rank 0: a bar, or lines where there is no terminal."""

    def __init__(self, args: argparse.Namespace, limit: float) -> None:
        with_bar = sys.stderr.isatty() if args.bar is None else args.bar
        self.lines = hvd.rank() == 0 and not with_bar
        self.unit = "step" if args.steps else "s"
        form = "{l_bar}{bar}| {n:.0f}/{total:.0f} {unit}{postfix}"
        off = hvd.rank() != 0 or not with_bar
        self.bar = tqdm(total=limit, disable=off, ncols=80, unit=self.unit, mininterval=0.5, bar_format=form)

    def move(self, to: float) -> None:
        self.bar.update(min(to, self.bar.total) - self.bar.n)

    def tell(self, at: float, step: int, loss: float) -> None:
        self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        if self.lines:
            print(f"{at:.0f} {self.unit}: rank 0 at step {step}, loss {loss:.3f}", flush=True)

    def close(self) -> None:
        self.bar.close()


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number. Received: {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more. Received: {text}")
    return value


def _slow_rank(text: str) -> tuple[int, float]:
    rank, _, seconds = text.partition(":")
    try:
        return int(rank), _positive(seconds)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be RANK:SECONDS, such as 3:0.05. Received: {text!r}") from error
