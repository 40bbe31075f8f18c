"""Listens to autograd: which gradients arrived, and when a backward pass is over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch


class BackwardHooks:
    """Calls `before(parameter)` and `after(parameter, again)` around each accumulation into `parameter.grad`, and
    `finished()` when the outermost backward pass in which that happened is over, before `backward()` returns. `again`:
    it is not the first one in this pass.
    """

    def __init__(
        self,
        before: Callable[[torch.nn.Parameter], None],
        after: Callable[[torch.nn.Parameter, bool], None],
        finished: Callable[[], None],
    ) -> None:
        self._before = before
        self._after = after
        self._finished = finished
        self._handles: dict[torch.nn.Parameter, list[Any]] = {}
        self._in_backward = False
        self._seen: set[torch.nn.Parameter] = set()  # in this backward pass

    def watch(self, parameter: torch.nn.Parameter) -> bool:
        """Start watching; False if it is watched already, or cannot be while it requires no gradient."""
        if parameter in self._handles or not parameter.requires_grad:
            return False
        self._handles[parameter] = [
            parameter.register_hook(lambda _: self._before(parameter)),
            parameter.register_post_accumulate_grad_hook(self._accumulated),
        ]
        return True

    def close(self) -> None:
        """Stop watching."""
        for handle in itertools.chain.from_iterable(self._handles.values()):
            handle.remove()
        self._handles.clear()

    def reset(self) -> None:
        """Forget a backward pass that was broken off by an exception."""
        self._in_backward = False
        self._seen.clear()

    def _accumulated(self, parameter: torch.nn.Parameter) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._call_at_end()
        again = parameter in self._seen
        self._seen.add(parameter)
        self._after(parameter, again)

    def _call_at_end(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        node = torch._C._current_autograd_node()
        if node is not None:  # the end of a re-entrant backward (checkpointing) inside the one that matters
            node.register_hook(lambda *_: self._call_at_end())
            return
        self.reset()
        self._finished()


def check_once(name: str, again: bool) -> None:
    """Raise ValueError if a gradient changes that may be on its way already."""
    if again:
        raise ValueError(
            f"The gradient of {name!r} was accumulated twice in one backward pass, by several re-entrant checkpoints, "
            f"after it was taken for complete: call checkpoint(..., use_reentrant=False)."
        )
