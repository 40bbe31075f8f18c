"""What users may ask of `Compression.adaptive`, and what they are told when they may not."""

from __future__ import annotations

import math

import pytest
from helpers import short_repr

from hvd_sparse import registry
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.config import adaptive_config, sparse_config
from hvd_sparse.controllers.bandwidth import Bandwidth
from hvd_sparse.controllers.fixed import Fixed
from hvd_sparse.planner.choice import LADDER
from hvd_sparse.sparsifiers.leader import Leader


class Own:
    """A third party's collective."""

    needs_shared_indices = has_quotas = False

    def reduce(self, *args):
        pass


def test_defaults():
    """Those of `sparse_config`, but for the controller, which takes its own, and the collective."""
    config, sparse = adaptive_config(), sparse_config(collective="by_size")
    assert type(config.controller) is Bandwidth
    assert vars(config.controller) == vars(Bandwidth(collective="by_size"))
    assert config.controller.ladder() == (1.0, *LADDER)
    assert {**config.describe(), "controller": ""} == {**sparse.describe(), "controller": ""}
    assert not config.scheme().rescale


SETTINGS = {
    "budget_seconds": 0.02,
    "exposed_fraction": 0.2,
    "ladder": (0.1, 0.01),
    "period": 20,
    "hysteresis": 0.2,
    "margin": 0.2,
    "gain_floor": 0.7,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_reach_the_controller(name):
    controller = adaptive_config(**{name: SETTINGS[name]}).controller
    assert vars(controller) == vars(Bandwidth(collective="by_size", **{name: SETTINGS[name]}))
    assert vars(controller) != vars(adaptive_config().controller)


@pytest.mark.parametrize("name", ["density", "controller", "warmup_steps"])
@pytest.mark.parametrize("value", [0.01, None, 0, Fixed(0.1)], ids=short_repr)
def test_what_adapts_cannot_be_given(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is what adapts: leave it out") as info:
        adaptive_config(**{name: value})
    assert f"Compression.sparse({name}=...)" in str(info.value)
    assert f"Received: {name}={value!r}." in str(info.value)


def test_all_settings_have_names():
    with pytest.raises(TypeError):
        adaptive_config(0.03)
    with pytest.raises(TypeError, match="bandwidth"):
        adaptive_config(bandwidth=1e9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget_seconds", 0),
        ("budget_seconds", "30ms"),
        ("exposed_fraction", 1),
        ("exposed_fraction", -0.1),
        ("exposed_fraction", math.nan),
        ("ladder", ()),
        ("ladder", 0.1),
        ("ladder", (0.1, 0)),
        ("ladder", (0.1, "0.01")),
        ("period", 0),
        ("period", 1.5),
        ("hysteresis", -0.1),
        ("hysteresis", math.nan),
        ("margin", -0.1),
        ("margin", math.inf),
        ("gain_floor", 0),
        ("gain_floor", 1.1),
        ("bucket_bytes", 0.5),
        ("min_size", -1),
        ("timeout_seconds", 0),
        ("sparsifier", "top-k"),
        ("collective", "alltoall"),
        ("memory", "momentun"),
        ("wire", "fp8"),
    ],
    ids=short_repr,
)
def test_out_of_range(name, value):
    with pytest.raises((ValueError, TypeError), match=f"`{name}` must be ") as info:
        adaptive_config(**{name: value})
    assert f"Received: {name}=" in str(info.value)


def test_parts_that_do_not_work_together():
    with pytest.raises(ValueError, match="needs a sparsifier whose indices are equal on all ranks"):
        adaptive_config(collective="shared_allreduce")


@pytest.mark.parametrize("name", registry.METHODS["collective"])
def test_the_controller_knows_the_collective(name):
    more = {"sparsifier": "random_block"} if name == "shared_allreduce" else {}
    assert adaptive_config(collective=name, **more).controller.collective == name


def test_the_controller_knows_a_collective_that_was_not_named():
    assert adaptive_config().controller.collective == "by_size"
    assert adaptive_config(wire="compact").controller.entry_bytes == 4
    assert adaptive_config(collective="owner_reduce").controller.collective == "owner_reduce"
    assert adaptive_config(sparsifier="random_block").controller.collective == "shared_allreduce"
    assert adaptive_config(collective=OwnerReduce("fp16")).controller.collective == "owner_reduce"
    assert adaptive_config(collective=Own()).controller.collective == "owner_reduce", "the usual volume"


@pytest.mark.parametrize(("wire", "entry_bytes"), [(None, 8), ("fp32", 8), ("fp16", 6), ("compact", 4)])
@pytest.mark.parametrize("collective", ["owner_reduce", "allgather", "by_size"])
def test_the_controller_knows_how_long_entries_are(collective, wire, entry_bytes):
    assert adaptive_config(collective=collective, wire=wire).controller.entry_bytes == entry_bytes


@pytest.mark.parametrize(
    ("settings", "entry_bytes"),
    [
        ({"sparsifier": "random_block"}, 4),
        ({"sparsifier": "leader"}, 12),
        ({"sparsifier": Leader(index_carrier="broadcast")}, 8),
        ({"collective": "hierarchical"}, 8),
        ({"collective": "hierarchical", "wire": "fp16"}, 6),
        ({"collective": "hierarchical", "wire": "compact"}, 4),
    ],
    ids=short_repr,
)
def test_entries_without_an_index_of_their_own_and_those_of_another_collective(settings, entry_bytes):
    assert adaptive_config(**settings).controller.entry_bytes == entry_bytes


def test_other_settings_are_those_of_sparse_config():
    settings = {"sparsifier": "topk", "memory": "momentum", "bucket_bytes": 1024, "min_size": 0, "timeout_seconds": 5}
    config, sparse = adaptive_config(**settings), sparse_config(collective="by_size", **settings)
    assert {**config.describe(), "controller": ""} == {**sparse.describe(), "controller": ""}


# Ranks compare these words.


def test_description_names_every_setting():
    assert adaptive_config(period=20, ladder=[0.01, 0.1]).describe()["controller"] == (
        "Bandwidth(budget_seconds=None, collective='by_size', densities=(0.1, 0.01), entry_bytes=8.0, "
        "exposed_fraction=0.05, gain_floor=None, hysteresis=0.1, margin=0.1, period=20)"
    )


@pytest.mark.parametrize(
    "other",
    [
        *({name: value} for name, value in SETTINGS.items()),
        {"ladder": (*LADDER, 0.2)},
        {"collective": "allgather"},
        {"wire": "fp16"},
        {"memory": "none"},
        {"bucket_bytes": 1024},
        {"min_size": 0},
        {"timeout_seconds": 5},
    ],
    ids=short_repr,
)
def test_description_differs_when_a_setting_does(other):
    assert adaptive_config(**other).describe() == adaptive_config(**other).describe()
    assert adaptive_config(**other).describe() != adaptive_config().describe()


def test_description_is_that_of_the_ladder_whatever_its_order():
    first, second = ([*LADDER], tuple(reversed(LADDER)))
    assert adaptive_config(ladder=first).describe() == adaptive_config(ladder=second).describe()


def test_description_says_that_it_adapts():
    assert adaptive_config().describe() != sparse_config(0.011).describe()
