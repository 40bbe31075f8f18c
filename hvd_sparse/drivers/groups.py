"""The ranks of one host, and those with the same place on every host, as Horovod's process sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hvd_sparse.types import World

_made: dict[tuple[int, ...], Any] = {}  # Horovod refuses a second set of the same ranks


class _Alone:
    """A group of this rank only, for which no process set is needed."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def is_elastic() -> bool:
    """Whether ranks may come and go: horovodrun was given a discovery script, or a least number of ranks."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def world_of(process_sets: Mapping[str, Any], step: Any) -> World:
    """The ranks that take part, at exchange number `step`."""
    places = {name: (group.rank(), group.size()) for name, group in process_sets.items()}
    rank, size = places.pop("global")
    return World(rank, size, step, places)


def check_host_groups(hvd: Any, process_set: Any, groups: tuple[str, ...]) -> None:
    """Whether `make_host_groups` will succeed.

    Args:
        hvd: the Horovod module in use.
        process_set: the ranks that train together.
        groups: those that the collective names.

    Raises:
        ValueError: it will not; the message says why.
    """
    if not groups:
        return
    if process_set.size() != hvd.size():
        raise ValueError("`collective` 'hierarchical' needs all ranks: it cannot be used with `process_set`.")
    if is_elastic():
        raise ValueError(
            "`collective` 'hierarchical' cannot be used with elastic training: a rank that joins would make process "
            "sets alone. Choose another, owner_reduce say."
        )
    regular = hvd.size() == hvd.local_size() * hvd.cross_size()
    if not regular or hvd.rank() != hvd.cross_rank() * hvd.local_size() + hvd.local_rank():
        raise ValueError(
            f"`collective` 'hierarchical' needs equally many ranks on every host, numbered host by host. Received: "
            f"rank {hvd.rank()} of {hvd.size()} is number {hvd.local_rank()} of {hvd.local_size()} on host "
            f"{hvd.cross_rank()} of {hvd.cross_size()}."
        )
    several = hvd.local_size() > 1 and hvd.cross_size() > 1
    if several and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") in ("", "0"):
        raise ValueError(
            "`collective` 'hierarchical' needs process sets that are made now: call hvd.init(process_sets='dynamic')."
        )


def make_host_groups(hvd: Any, process_set: Any, groups: tuple[str, ...]) -> dict[str, Any]:
    """The process sets by name: "global", and "local" and "cross" if the collective names them. On all ranks alike."""
    if not groups:
        return {"global": process_set}
    num_local, num_hosts = hvd.local_size(), hvd.cross_size()
    local = [tuple(range(host * num_local, (host + 1) * num_local)) for host in range(num_hosts)]
    cross = [tuple(ranks) for ranks in zip(*local)]

    def own(sets: list[tuple[int, ...]]) -> Any:
        if len(sets) == 1:
            return process_set
        if len(sets) == hvd.size():
            return _Alone()
        for ranks in sets:  # every rank makes every set
            if ranks not in _made or _made[ranks].process_set_id is None:
                _made[ranks] = hvd.add_process_set(list(ranks))
        return next(_made[ranks] for ranks in sets if hvd.rank() in ranks)

    return {"global": process_set, "local": own(local), "cross": own(cross)}
