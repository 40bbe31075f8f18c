"""Which configurations must keep Horovod's response cache, on which gradients, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from methods import is_legal
from timeline import Use

from hvd_sparse import registry
from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.requests import AllGather
from hvd_sparse.config import Config, sparse_config
from hvd_sparse.ops.base import Ops
from hvd_sparse.schemes.ok_topk import OkTopk
from hvd_sparse.types import Array, Program, Reduced, Sparse, Spec, World

NUM_STEPS = 9  # one of each of KINDS
DENSITY = 0.1
# Large enough for a threshold that is estimated from a sample, and no multiple of 2 or 3 ranks.
SHAPES = {"large": (151, 97), "small": (53, 61), "bias": (33,)}
BUCKET_BYTES = 40_000  # one of them in a bucket
KINDS = ("normal", "zeros", "zeros on one rank", "one value", "equal", "heavy", "nan", "tiny", "grown")


class UnevenGather(AllGatherSum):
    """What must not be done: a gather whose length changes under a constant name."""

    def reduce(self, ops: Ops, world: World, spec: Spec, x: Array, k: int, local: Sparse) -> Program[Reduced]:
        more = yield AllGather(x[: 1 + world.step % 2], tag="uneven")
        reduced = yield from super().reduce(ops, world, spec, x, k, local)
        return replace(reduced, finite=reduced.finite & ops.all_finite(more))


def configurations(every_pair: bool = True) -> dict[str, Config]:
    """Every legal pair of a sparsifier and a collective that keeps the cache, with the default pair also the other
    memory and the shortest wire format, and the scheme whose messages vary; by name. Without
    `every_pair` only those in which a default is, for a front that is slow.
    """
    found: dict[str, Config] = {}
    for sparsifier in registry.METHODS["sparsifier"]:
        selection = registry.create("sparsifier", sparsifier)
        usual = "shared_allreduce" if selection.shared_indices else "owner_reduce"
        for collective in registry.METHODS["collective"]:
            summation = registry.create("collective", collective)
            usual_pair = collective == usual or (sparsifier == "threshold" and collective != "hierarchical")
            cached = getattr(summation, "keeps_cache", True)
            if not cached or not is_legal(selection, summation) or not (usual_pair or every_pair):
                continue
            variants: list[dict[str, Any]] = [{}]
            # On one host `hierarchical` is dense; tests/netlab has it on several.
            if sparsifier == "threshold" and usual_pair and (collective == usual or every_pair):
                variants += [{"memory": "momentum"}, {"wire": "compact"}]
            for variant in variants:
                found[", ".join([sparsifier, collective, *variant.values()])] = sparse_config(
                    DENSITY, sparsifier=sparsifier, collective=collective, min_size=1, bucket_bytes=BUCKET_BYTES,
                    **variant,
                )  # fmt: skip
    varying = OkTopk(region_period=1)  # so that every step has all rounds
    found["ok_topk"] = sparse_config(DENSITY, scheme=varying, min_size=1, bucket_bytes=BUCKET_BYTES)
    return found


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    """What a step may meet."""
    kind, random = KINDS[step % len(KINDS)], np.random.default_rng(100 * step + rank)
    made = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    if kind == "zeros" or (kind == "zeros on one rank" and rank == 0):
        return {name: 0 * gradient for name, gradient in made.items()}
    if kind == "equal":
        return {name: np.ones_like(gradient) for name, gradient in made.items()}
    if kind == "heavy":
        return {name: gradient**9 for name, gradient in made.items()}
    if kind in ("tiny", "grown"):
        return {name: gradient * np.float32(1e-30 if kind == "tiny" else 1e6) for name, gradient in made.items()}
    for gradient in made.values():
        if kind == "one value":
            gradient.reshape(-1)[1:] = 0
        if kind == "nan" and rank == 1:
            gradient.reshape(-1)[7] = np.nan
    return made


def negotiated_again(uses: dict[str, Use], prefix: str) -> list[str]:
    """The operations of one wrapper that ranks had to agree on more than once. `prefix` is that of its driver."""
    return [f"{name}: {use}" for name, use in uses.items() if f".{prefix}." in name and use.negotiated != 1]


def complaints(uses: dict[str, Use], prefix: str, num_buckets: int) -> list[str]:
    """What is wrong with the operations of one wrapper that exchanged so many buckets in every step."""
    found = negotiated_again(uses, prefix)
    for bucket in [f"b{number}" for number in range(num_buckets)]:
        rounds = {name: use for name, use in uses.items() if f".{prefix}.{bucket}." in name}
        if not rounds or any(use.ran != NUM_STEPS for use in rounds.values()):
            found.append(f"{bucket} was not exchanged in every step: {rounds}")
    return found
