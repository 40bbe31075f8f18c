"""Every method of the registry, the data to try it on, and what holds after every step.

A method is a sparsifier, a collective and a memory, or a scheme of its own and a memory. VARIANTS lists arguments where
the defaults do not do for small exact tests; everything else is made without arguments.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import (
    BackEnd,
    Ranks,
    Step,
    assert_bits_equal,
    assert_close,
    assert_conserved,
    assert_same_on_ranks,
    frozen,
)

from hvd_sparse import registry
from hvd_sparse.config import sparse_config
from hvd_sparse.exchange import Exchange
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.types import Spec

# 1009 is prime, and at k = 100 large enough for a threshold that is really estimated from a sample.
SIZE, KEPT = 1009, 100
SIZES = [1, 2, 3, 5]  # of the world

VARIANTS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("sparsifier", "threshold"): [{}, {"min_hits": 16}],
    ("sparsifier", "leader"): [{}, {"mode": "var"}],
    ("collective", "owner_reduce"): [{}, {"wire": "compact"}],
    ("collective", "allgather"): [{}, {"wire": "fp16"}],
    ("collective", "gtopk"): [{}, {"account_leak": True}],
    # Powers of two: integer gradients stay exact in float32.
    ("memory", "momentum"): [
        {"momentum": 0.5},
        {"momentum": 0.5, "nesterov": True},
        {"momentum": 0.5, "masking": False},
    ],
    ("controller", "fixed"): [{"density": 0.01}],
    ("controller", "warmup"): [{"density": 0.001, "warmup_steps": 12}],
}


def parts(kind: str) -> list[tuple[str, Any]]:
    """(name, object) of every method of a kind, in every variant."""
    found = []
    for name in registry.METHODS[kind]:
        for arguments in VARIANTS.get((kind, name), [{}]):
            words = ",".join(f"{key}={value}" for key, value in arguments.items())
            found.append((name + (f"({words})" if words else ""), registry.create(kind, name, **arguments)))
    return found


# The first variant of every method.
DEFAULTS = {
    next(name for name, _ in parts(kind) if name.partition("(")[0] == method)
    for kind in registry.METHODS
    if kind in ("sparsifier", "collective", "memory")
    for method in registry.METHODS[kind]
}


def is_legal(sparsifier: Any, collective: Any) -> bool:
    if sparsifier.shared_indices:
        return not collective.has_quotas
    return not collective.needs_shared_indices


PAIRS = list(itertools.product(parts("sparsifier"), parts("collective")))
METHODS: dict[str, tuple[Any, Any]] = {}
for _memory_name, _memory in parts("memory"):
    for (_sparsifier_name, _sparsifier), (_collective_name, _collective) in PAIRS:
        _names = (_sparsifier_name, _collective_name, _memory_name)
        # Variants only one at a time, or there would be thousands.
        if is_legal(_sparsifier, _collective) and sum(name not in DEFAULTS for name in _names) <= 1:
            _config = sparse_config(sparsifier=_sparsifier, collective=_collective, memory=_memory)
            METHODS["-".join(_names)] = (_config.scheme(), _memory)
    for _scheme_name in registry.METHODS["scheme"]:
        if _scheme_name != "sparse":
            METHODS[f"{_scheme_name}-{_memory_name}"] = (registry.create("scheme", _scheme_name), _memory)

every_method = pytest.mark.parametrize("method", METHODS)


def ranks_of(method: str, size: int, backend: BackEnd, num_elements: int = SIZE) -> Ranks:
    scheme, memory = METHODS[method]
    return Ranks(Exchange(Spec("b", num_elements), scheme, memory), size, backend)


def normal(seed: int, size: int, num_elements: int = SIZE) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [frozen(rng.normal(size=num_elements), np.float32) for _ in range(size)]


def integers(seed: int, size: int, num_elements: int = SIZE, limit: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [frozen(rng.integers(-limit, limit + 1, num_elements), np.float32) for _ in range(size)]


def constant(value: float, size: int, num_elements: int = SIZE) -> list[np.ndarray]:
    return [frozen(np.full(num_elements, value), np.float32)] * size


def conserves(scheme: Any) -> bool:
    """Whether nothing is lost: what ranks keep and the total add up to what they had."""
    return bool(getattr(scheme, "conserves", True))


def assert_sound(step: Step, method: str, k: int, tolerance: float = 1e-5) -> None:
    """What holds after every step with finite data."""
    scheme, _ = METHODS[method]
    assert all(step.finite)
    assert_same_on_ranks(step.totals)
    sparse = isinstance(scheme, SparseSum) and k < len(step.totals[0])
    if sparse:
        most = max(k, len(step.used)) if scheme.collective.has_quotas else k
        assert max(step.num_used(rank) for rank in range(len(step.used))) <= most
    gain = len(step.totals[0]) / k if sparse and scheme.rescale else 1.0
    if any(reduced.kept is not None for reduced in step.reduced):
        kept = step.kept or [reduced.kept for reduced in step.reduced]
        assert_conserved(step.accumulated, step.totals[0] / gain, kept, tolerance if gain == 1 else 1e-5)
        return
    for rank, (reduced, used, x) in enumerate(zip(step.reduced, step.used, step.accumulated)):
        if reduced.left is None:
            assert_bits_equal(used[used != 0], x[used != 0], f"used and accumulated of rank {rank}")
    if not conserves(scheme):
        return
    scale = max(1.0, gain * max(float(np.abs(x).max()) for x in step.accumulated))
    assert_close(
        step.totals[0] / scale, gain * np.sum(step.used, axis=0, dtype=np.float64) / scale, max(tolerance, 1e-6)
    )
    if step.kept is not None:
        assert_conserved(step.accumulated, step.totals[0], step.kept, tolerance)
