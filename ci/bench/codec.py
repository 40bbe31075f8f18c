"""What compression costs on one bucket, in units of one addition of its size.

Runs the front's own `Bucket` and the exchange inside it, at steady state, on two simulated ranks, whose requests are
answered as the network would. Only rank 0 is timed, and only outside the network:

    compensate  residual + gradient, into the spare buffer
    select      which entries to send
    pack        their values, indices and values in one tensor
    apply       unpack, sum over the ranks into the dense result, test for infinities, divide by the number of ranks;
                with owner_reduce also what an owner does between the two rounds
    clear       what was sent leaves the residual

One thread. Prints medians, writes JSON, and ends with status 1 if the ratio is above --bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("compensate", "select", "pack", "apply", "clear")


class Timed:
    """Stands in for a sparsifier and notes how long its last selection took."""

    def __init__(self, sparsifier: Any, clock: Any) -> None:
        self._sparsifier = sparsifier
        self._clock = clock
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sparsifier, name)

    def select(self, *args: Any) -> Any:
        """As the sparsifier's own. One that communicates would count its waiting, which takes no time here."""
        started = self._clock()
        selected = yield from self._sparsifier.select(*args)
        self.seconds = self._clock() - started
        return selected


class TorchCodec:
    """Two ranks' buckets of the torch front, and the addition that they are compared with."""

    def __init__(self, num_elements: int, density: float, device: str, parts: dict[str, str]) -> None:
        import torch

        from hvd_sparse.buckets import Layout, Member
        from hvd_sparse.config import sparse_config
        from hvd_sparse.exchange import Exchange
        from hvd_sparse.torch.bucket import Bucket
        from hvd_sparse.types import Spec, World, num_kept

        torch.set_num_threads(1)
        self.torch, self.device, self.world = torch, device, World
        self.k = num_kept(density, num_elements)
        self.generator = torch.Generator(device).manual_seed(0)
        self.parameter = torch.nn.Parameter(torch.zeros(num_elements, device=device))
        config = sparse_config(density, **parts)
        layout = Layout(Spec("b0", num_elements), (Member("w", 0, num_elements),), dense=False)
        self.buckets = []
        for _ in range(2):
            scheme = config.scheme()
            scheme.sparsifier = Timed(scheme.sparsifier, self.clock)
            self.buckets.append(Bucket(layout, Exchange(layout.spec, scheme, config.memory), [self.parameter]))
        self.grads = [torch.empty(num_elements, device=device) for _ in range(2)]
        self.terms = [torch.randn(num_elements, device=device, generator=self.generator) for _ in range(2)]
        self.sum = torch.empty(num_elements, device=device)

    def clock(self) -> float:
        """Seconds, when all that was asked of the device is done."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def addition(self) -> float:
        """Seconds of one addition of the bucket's size."""
        started = self.clock()
        self.torch.add(*self.terms, out=self.sum)
        return self.clock() - started

    def step(self, number: int) -> dict[str, float]:
        """Seconds of each part on rank 0 in one step with fresh gradients."""
        for grad in self.grads:
            grad.normal_(generator=self.generator)
        mine, other = self.buckets
        other.add(self.parameter, self.grads[1], 2, 1.0)
        other_program = other.program(self.world(1, 2, number, gain=0.5), self.k)
        other_request, _ = _advance(other_program, None)

        times = [self.clock()]
        mine.add(self.parameter, self.grads[0], 2, 1.0)
        times.append(self.clock())
        program = mine.program(self.world(0, 2, number, gain=0.5), self.k)
        request, _ = _advance(program, None)
        times.append(self.clock())
        apply = 0.0
        while request is not None:
            answers = _answers(request, other_request, self.torch.cat)
            other_request, other_reduced = _advance(other_program, answers[1])
            started = self.clock()
            request, reduced = _advance(program, answers[0])
            apply += self.clock() - started
        started = self.clock()
        mine.averages(reduced)
        applied = self.clock()
        mine.commit()
        apply, clear = apply + applied - started, self.clock() - applied

        other.averages(other_reduced)
        other.commit()
        compensate, select_and_pack = (b - a for a, b in zip(times, times[1:]))
        select = mine.exchange.scheme.sparsifier.seconds
        return dict(zip(PARTS, (compensate, select, select_and_pack - select, apply, clear)))

    @property
    def num_selected(self) -> int:
        """Entries above the threshold in the last step, of which k are sent."""
        return int(self.buckets[0].state["scheme"].get("count", self.k))


def _advance(program: Any, answer: Any) -> tuple[Any, Any]:
    """The program's next request, or None and its result."""
    try:
        return program.send(answer), None
    except StopIteration as stop:
        return None, stop.value


def _answers(mine: Any, other: Any, concatenate: Any) -> tuple[Any, Any]:
    """What the network would say to the two ranks' requests."""
    kind = type(mine).__name__
    if kind == "AllGather":
        return concatenate([mine.tensor, other.tensor], 0), concatenate([mine.tensor, other.tensor], 0)
    if kind == "AllToAll":  # one row for each rank
        return tuple((concatenate([mine.tensor[r : r + 1], other.tensor[r : r + 1]], 0), None) for r in range(2))
    return mine.tensor + other.tensor, mine.tensor + other.tensor


class TensorFlowCodec:
    """A bucket of the TensorFlow front in a compiled graph, which leaves no parts to be timed by themselves."""

    def __init__(self, num_elements: int, density: float, device: str, parts: dict[str, str]) -> None:
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)

        from hvd_sparse.buckets import Layout, Member
        from hvd_sparse.config import sparse_config
        from hvd_sparse.exchange import Exchange
        from hvd_sparse.tensorflow.bucket import Bucket
        from hvd_sparse.types import Spec, World, num_kept

        self.tf, self.k = tf, num_kept(density, num_elements)
        config = sparse_config(density, **parts)
        layout = Layout(Spec("b0", num_elements), (Member("w", 0, num_elements),), dense=False)
        self.buckets = [Bucket(layout, Exchange(layout.spec, config.scheme(), config.memory), False) for _ in range(2)]
        self.terms = [tf.random.normal([num_elements]) for _ in range(2)]
        self.add = tf.function(lambda a, b: a + b)

        def program(rank: int, grad: Any, number: Any) -> Any:
            return self.buckets[rank].program(World(rank, 2, number, gain=0.5), grad, self.k)

        @tf.function(autograph=False)
        def both(mine: Any, other: Any, number: Any) -> Any:
            programs = [program(0, mine, number), program(1, other, number)]
            steps, told = [_advance(one, None) for one in programs], []
            while steps[0][0] is not None:
                requests = [request for request, _ in steps]
                told.append(requests[1].tensor)
                steps = [_advance(one, answer) for one, answer in zip(programs, _answers(*requests, tf.concat))]
            return [reduced.total for _, reduced in steps], told

        @tf.function(autograph=False)
        def timed(mine: Any, told: list[Any], number: Any) -> Any:
            alone, waiting = program(0, mine, number), list(told)
            request, reduced = _advance(alone, None)
            while request is not None:
                other = replace(request, tensor=waiting.pop(0))
                request, reduced = _advance(alone, _answers(request, other, tf.concat)[0])
            return reduced.total

        self.both, self.timed = both, timed
        self.told: Any = None  # what rank 1 said

    def addition(self) -> float:
        """Seconds of one addition of the bucket's size."""
        started = time.perf_counter()
        self.add(*self.terms)
        return time.perf_counter() - started

    def step(self, number: int) -> dict[str, float]:
        """Seconds of rank 0's step with a fresh gradient; rank 1's entries are those of an early step."""
        grad, step = self.tf.random.normal(self.terms[0].shape), self.tf.constant(number, self.tf.int64)
        if self.told is None:
            _, self.told = self.both(grad, self.terms[1], step)
        started = time.perf_counter()
        self.timed(grad, self.told, step)
        return {"whole step": time.perf_counter() - started}

    @property
    def num_selected(self) -> int:
        """Entries above the threshold in the last step, of which k are sent."""
        count = self.buckets[0].scheme.get("count")
        return self.k if count is None else int(count.numpy())


CODECS = {"torch": TorchCodec, "tensorflow": TensorFlowCodec}
BARS = {"torch": 6.0, "tensorflow": 8.0}


def measure(codec: Any, warmup: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` steps, each with an addition before and after it, so that both see the same machine."""
    for number in range(warmup):
        codec.step(number)
        codec.addition()
    additions, steps, selected = [], [], []
    for number in range(warmup, warmup + repeats):
        additions.append(codec.addition())
        steps.append(codec.step(number))
        additions.append(codec.addition())
        selected.append(codec.num_selected / codec.k)
    addition = statistics.median(additions)
    total = statistics.median(sum(step.values()) for step in steps)
    return {
        "addition_ms": addition * 1e3,
        "total_ms": total * 1e3,
        "parts_ms": {part: statistics.median(step[part] for step in steps) * 1e3 for part in steps[0]},
        "ratio": total / addition,
        "selected": {"min": min(selected), "median": statistics.median(selected), "max": max(selected)},
    }


def print_table(result: dict[str, Any]) -> None:
    """One row for each part, then the sum and what it is compared with."""
    addition, parts = result["addition_ms"], result["parts_ms"]
    print(f"{'part':<14}{'ms':>9}{'share':>9}{'additions':>12}")
    for part, milliseconds in parts.items():
        share = milliseconds / sum(parts.values())
        print(f"{part:<14}{milliseconds:>9.2f}{share:>9.1%}{milliseconds / addition:>12.2f}")
    print(f"{'total':<14}{result['total_ms']:>9.2f}{1:>9.1%}{result['ratio']:>12.2f}")
    print(f"{'one addition':<14}{addition:>9.2f}{'':>9}{1:>12.2f}")
    low, high = result["selected"]["min"], result["selected"]["max"]
    print(f"entries above the threshold: {low:.2f} to {high:.2f} k")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=sorted(CODECS), default="torch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--sparsifier", default="threshold")
    parser.add_argument("--collective", default="allgather")
    parser.add_argument("--memory", default="residual")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the measurement (%(default)s)")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--bar", type=float, help="highest ratio that passes (6 for torch, 8 for tensorflow)")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "codec.json")
    args = parser.parse_args()
    parts = {"sparsifier": args.sparsifier, "collective": args.collective, "memory": args.memory}
    codec = CODECS[args.framework](args.elements, args.density, args.device, parts)
    result = measure(codec, args.warmup, args.repeats)
    settings = report.settings_of(args)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**settings, **result}, indent=1) + "\n")
    print_table(result)
    bar = BARS[args.framework] if args.bar is None else args.bar
    passed = result["ratio"] <= bar
    print(f"ratio of medians {result['ratio']:.2f}: {'within' if passed else 'ABOVE'} the bar of {bar:g}")
    return 0 if passed else 1


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before the framework is imported
    sys.exit(main())
