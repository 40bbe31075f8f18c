"""Every method of the registry, the data to try it on, and what holds after every step.

A method is a sparsifier, a collective and a memory, or a scheme of its own and a memory. VARIANTS lists arguments where
the defaults do not do for small exact tests; everything else is made without arguments.
"""

from __future__ import annotations

import itertools
import math
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
    ("sparsifier", "topk"): [{}, {"scope": "parameter"}],
    ("sparsifier", "leader"): [{}, {"mode": "var"}],
    # The buckets are smaller than the usual block.
    ("sparsifier", "block_topk"): [{"block_size": 64}, {"block_size": 64, "mode": "blocks"}],
    ("sparsifier", "exclusive"): [{}, {"layout": "contiguous"}],
    ("sparsifier", "importance"): [{}, {"num_roots": 2, "random_share": 0.25}],
    ("collective", "owner_reduce"): [{}, {"wire": "compact"}],
    ("collective", "allgather"): [{}, {"wire": "fp16"}],
    ("collective", "gtopk"): [{}, {"account_leak": True}],
    # Powers of two: integer gradients stay exact in float32.
    ("memory", "momentum"): [
        {"momentum": 0.5},
        {"momentum": 0.5, "nesterov": True},
        {"momentum": 0.5, "masking": False},
        {"momentum": 0.5, "masking": "stale"},
    ],
    ("memory", "sgc"): [{"momentum": 0.5}],
    ("scheme", "sparse"): [],  # it is every pair of a sparsifier and a collective
    # At this density the default would be dense.
    ("scheme", "sketch"): [{"num_rows": 3, "cells_per_entry": 2, "candidates": 2}],
    ("scheme", "low_rank"): [{}, {"rank": 1}, {"rank": 2, "tolerance": 0.4, "period": 2}],
    ("scheme", "static"): [{}, {"variance": 0.5, "weight": 1.0, "refresh_every": 3}],
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
    for kind in ("sparsifier", "collective", "memory", "scheme")
    for method in registry.METHODS[kind]
    if VARIANTS.get((kind, method)) != []
}


def is_legal(sparsifier: Any, collective: Any) -> bool:
    if sparsifier.shared_indices:
        return not collective.has_quotas
    return not collective.needs_shared_indices


PAIRS = list(itertools.product(parts("sparsifier"), parts("collective")))


def _methods() -> dict[str, tuple[Any, Any]]:
    """Every legal pair of sparsifier and collective, each further memory with every collective, each variant once.

    All combinations would be thousands.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for number, (memory_name, memory) in enumerate(parts("memory")):
        met: set[str] = set()
        is_variant = memory_name not in DEFAULTS
        for (sparsifier_name, sparsifier), (collective_name, collective) in PAIRS:
            variants = {sparsifier_name, collective_name} - DEFAULTS
            is_usual = collective.needs_shared_indices == sparsifier.shared_indices
            is_new = len(variants) == 1 and not variants <= met and is_usual
            is_wanted = (not variants or is_new) if number == 0 else not variants and collective_name not in met
            if is_wanted and is_legal(sparsifier, collective) and not (is_variant and met):
                config = sparse_config(sparsifier=sparsifier, collective=collective, memory=memory)
                found[f"{sparsifier_name}-{collective_name}-{memory_name}"] = (config.scheme(), memory)
                met |= {sparsifier_name, collective_name}
        for name, scheme in parts("scheme"):
            if number == 0 or (name in DEFAULTS and not is_variant):
                found[f"{name}-{memory_name}"] = (scheme, memory)
    return found


METHODS = _methods()
every_method = pytest.mark.parametrize("method", METHODS)


def ranks_of(method: str, size: int, backend: BackEnd, num_elements: int = SIZE) -> Ranks:
    scheme, memory = METHODS[method]
    return Ranks(Exchange(spec_of(num_elements), scheme, memory), size, backend)


def spec_of(num_elements: int) -> Spec:
    """A bucket with a matrix that is nearly square, and the rest."""
    rows = math.isqrt(num_elements)
    columns = num_elements // rows
    return Spec("b", num_elements, shapes=((rows, columns), (num_elements - rows * columns,)))


def tolerance_of(method: str) -> float:
    """What sums of integers may differ by, in units of the largest."""
    scheme, memory = METHODS[method]
    is_stale = getattr(memory, "masking", None) == "stale"  # a share of a velocity is no integer
    return 0 if scheme.exact and not is_stale else 1e-5


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
    tolerance = max(tolerance, tolerance_of(method))
    assert all(step.finite)
    assert_same_on_ranks(step.totals)
    assert_same_on_ranks(step.applied, "what is applied")
    sparse = isinstance(scheme, SparseSum) and k < len(step.totals[0])
    if sparse or (scheme.selects and step.reduced[0].used is not None):  # others may have found dense to be smaller
        capacity = getattr(getattr(scheme, "sparsifier", None), "capacity", None)
        most = capacity(Spec("b", len(step.totals[0])), k, len(step.used)) if capacity else k
        most = max(most, len(step.used)) if sparse and scheme.collective.has_quotas else most
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
