"""Records when gradients become ready, for `hvd-sparse plan --trace`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable
from typing import Any, TextIO

import torch

_WARM_UP, _STEPS = 5, 20


class Profile:
    """Writes {"version": 1, "step_seconds": s, "events": [[seconds since the one before, bytes], ...]} once.

    Medians over 20 backward passes after 5. What this package does between two gradients is taken out; what it costs
    otherwise (cores, memory bandwidth) is not, so that a run on one rank is the best to record.

    Args:
        file: open for writing; closed when it is written.
        parameters: all of the model.

    Reference: Z. Zhang et al., Is Network the Bottleneck of Distributed Training?, NetAI 2020, arXiv:2006.10103.
    """

    def __init__(self, file: TextIO, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._file = file
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._device = self._parameters[0].device
        self._passes: list[list[tuple[float, int]]] = []
        self._current: list[tuple[float, int]] = []
        self._steps: list[float] = []
        self._step_started = 0.0
        self._own = self._entered = 0.0
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in self._parameters]

    def watch_our_work(self) -> None:
        """Call when all other hooks are there: what runs between ours is not the model's time."""
        self._hooks += [p.register_post_accumulate_grad_hook(self._done) for p in self._parameters]

    def step_taken(self) -> None:
        """The optimizer has stepped."""
        if self._file.closed:
            return
        now = time.perf_counter()
        if self._current:
            self._passes.append(self._current)
            self._steps.append(now - self._step_started)
        self._current, self._step_started, self._own = [], now, 0.0
        if len(self._passes) == _WARM_UP + _STEPS:
            self._write()

    def _ready(self, parameter: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._entered = time.perf_counter()
        self._current.append((self._entered - self._own, parameter.numel() * 4))

    def _done(self, parameter: Any) -> None:
        self._own += time.perf_counter() - self._entered

    def _write(self) -> None:
        for hook in self._hooks:
            hook.remove()
        passes = self._passes[_WARM_UP:]
        usual = statistics.mode(len(one) for one in passes)
        passes = [one for one in passes if len(one) == usual]
        events = []
        for number in range(usual):
            gaps = [one[number][0] - one[number - 1][0] if number else 0.0 for one in passes]
            events.append([max(0.0, statistics.median(gaps)), passes[0][number][1]])
        seconds = statistics.median(self._steps[_WARM_UP:])
        with self._file as file:
            json.dump({"version": 1, "step_seconds": seconds, "events": events}, file)
