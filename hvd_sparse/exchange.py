"""One bucket's step: the only place where memory, scheme and k meet.

`compensate` (the memory) turns a gradient into the accumulator x, `Exchange.reduce` sends k of its n entries (and lets
a memory that has `follow` change what the optimizer gets), and `Exchange.commit` keeps the rest. What a reduction
returns is tentative until it is committed: a step that is not taken leaves every state as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hvd_sparse.buckets import Layout
from hvd_sparse.config import Config
from hvd_sparse.memories import Memory
from hvd_sparse.ops.base import Ops
from hvd_sparse.schemes import Scheme
from hvd_sparse.schemes.dense import Dense
from hvd_sparse.types import Array, Program, Reduced, Spec, State, World


def bucket_exchange(layout: Layout, config: Config) -> Exchange:
    """What `config` asks for, or the dense scheme for a bucket that is not worth compressing."""
    if layout.dense:
        return Exchange(layout.spec, Dense(), config.memory.for_dense())
    return Exchange(layout.spec, config.scheme(), config.memory)


@dataclass(frozen=True)
class Exchange:
    """How one bucket is exchanged. State: {"memory": ..., "scheme": ...}, owned by the caller."""

    spec: Spec
    scheme: Scheme
    memory: Memory

    def init(self, ops: Ops, like: Array | None = None) -> State:
        """State before the first step, on the device of `like`."""
        memory, shared = (
            {key: ops.zeros(self.spec.size, like) for key in keys} for keys in (self.memory.keys, self._shared)
        )
        return {"memory": memory, "scheme": {**self.scheme.init(ops, self.spec, like), **shared}}

    def step(self, ops: Ops, world: World, grad: Array, k: int, state: State) -> Program[tuple[Reduced, State]]:
        """A whole step: compensate, reduce, and commit unless some rank's numbers were not finite."""
        x, memory = self.memory.compensate(ops, world.size, grad, state["memory"])
        reduced, scheme = yield from self.reduce(ops, world, x, k, state["scheme"])
        reached = self.commit(ops, reduced, {"memory": memory, "scheme": scheme})
        if reduced.silent is not None:
            reached["memory"] = ops.where(reduced.silent, state["memory"], reached["memory"])
        return reduced, ops.where(reduced.finite, reached, state)

    def reduce(self, ops: Ops, world: World, x: Array, k: int, state: State) -> Program[tuple[Reduced, State]]:
        """Exchange the accumulator x (n,): the outcome, and the state of the scheme that it leads to."""
        reduced, scheme = yield from self.scheme.reduce(ops, world, self.spec, x, k, state)
        if not self._shared:
            return reduced, scheme
        memory: Any = self.memory
        given, shared = memory.follow(ops, world.gain, reduced, {key: state[key] for key in self._shared})
        return replace(reduced, given=given), {**scheme, **shared}

    def commit(self, ops: Ops, reduced: Reduced, reached: State) -> State:
        """The state after the step was taken: `reached` less what was used."""
        return {"memory": self.memory.update(ops, reduced, reached["memory"]), "scheme": reached["scheme"]}

    @property
    def _shared(self) -> tuple[str, ...]:
        """The memory's arrays that are equal on all ranks; they follow from the total, and live with the scheme's."""
        return tuple(getattr(self.memory, "shared_keys", ()))
