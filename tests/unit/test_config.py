"""What users may ask for, and what they are told when they may not."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import short_repr

from hvd_sparse import registry
from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.hierarchical import Hierarchical
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.collectives.shared_allreduce import SharedAllReduce
from hvd_sparse.config import adaptive_config, sparse_config
from hvd_sparse.controllers import Plan, Seen
from hvd_sparse.controllers.fixed import Fixed
from hvd_sparse.controllers.warmup import Warmup
from hvd_sparse.memories.momentum import Momentum
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.memories.residual import Residual
from hvd_sparse.schemes.low_rank import LowRank
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.random_block import RandomBlock
from hvd_sparse.sparsifiers.threshold import Threshold
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.wire import FORMATS, FP16, FP32


class Own:
    """A third party's part of every kind. No registration, no base class."""

    shared_indices = blind = needs_shared_indices = has_quotas = False
    keys, accumulator = (), None

    def init(self, *args):
        return {}

    def select(self, *args):
        pass

    def reduce(self, *args):
        pass

    def compensate(self, *args):
        pass

    def update(self, *args):
        pass

    def for_dense(self):
        return self

    def ladder(self):
        return (0.5,)

    def decide(self, seen, state):
        return Plan(0.5, "because"), state


class Slotted(Own):
    __slots__ = ()


def test_defaults():
    config = sparse_config()
    types = [type(part) for part in (config.sparsifier, config.collective, config.memory, config.controller)]
    assert types == [Threshold, OwnerReduce, Residual, Fixed]
    assert config.controller.decide(Seen(0), {})[0].density == 0.01
    assert not config.scheme().rescale


@pytest.mark.parametrize(
    ("density", "error"),
    [
        (0, ValueError),
        (0.0, ValueError),
        (-0.1, ValueError),
        (1.0000001, ValueError),
        (2, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("1%", TypeError),
        ("0.01", TypeError),
        (True, TypeError),
        (None, TypeError),
        ([0.1], TypeError),
        (1j, TypeError),
    ],
    ids=short_repr,
)
@pytest.mark.parametrize("more", [{}, {"warmup_steps": 5}], ids=["fixed", "warmup"])
def test_density_out_of_range(density, error, more):
    with pytest.raises(error) as info:
        sparse_config(density, **more)
    assert "`density` must be a number in (0, 1]" in str(info.value)
    assert f"Received: density={density!r}." in str(info.value)


@pytest.mark.parametrize("density", [1, 1.0, 1e-9, 0.5, np.float64(0.25)])
def test_density_in_range(density):
    assert sparse_config(density).controller.decide(Seen(0), {})[0].density == density


@pytest.mark.parametrize("kind", ["sparsifier", "collective", "memory"])
def test_unknown_names_are_answered_with_the_known_ones(kind):
    with pytest.raises(ValueError, match=f"`{kind}` must be one of") as info:
        sparse_config(**{kind: "top-k"})
    assert all(repr(name) in str(info.value) for name in registry.METHODS[kind])
    assert f"Received: {kind}='top-k'." in str(info.value)


@pytest.mark.parametrize("kind", ["sparsifier", "collective", "memory"])
def test_every_name_is_accepted(kind):
    for name in registry.METHODS[kind]:
        more = {"sparsifier": "random_block"} if name == "shared_allreduce" else {}
        part = getattr(sparse_config(**{**more, kind: name}), kind)
        assert type(part) is registry.method_class(kind, name)


@pytest.mark.parametrize("kind", ["sparsifier", "collective", "memory", "controller"])
@pytest.mark.parametrize("part", [7, 0.5, object(), TopK, Own, ("topk",), {}], ids=lambda part: type(part).__name__)
def test_what_is_no_part(kind, part):
    with pytest.raises(TypeError, match=f"`{kind}` must be one of") as info:
        sparse_config(**{kind: part})
    assert f"Received: {kind}={part!r}" in str(info.value)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("sparsifier", "blind"),
        ("sparsifier", "shared_indices"),
        ("sparsifier", "init"),
        ("collective", "needs_shared_indices"),
        ("memory", "keys"),
        ("memory", "for_dense"),
        ("controller", "init"),
    ],
)
def test_an_object_that_lacks_something_is_told_what(kind, missing):
    part = type("Part", (), {name: value for name, value in vars(Own).items() if name[0] != "_" and name != missing})()
    with pytest.raises(TypeError, match=f"has no {missing}"):
        sparse_config(**{kind: part})


def test_objects_of_third_parties():
    for part in (Own(), Slotted()):
        config = sparse_config(sparsifier=part, collective=part, memory=part, controller=part)
        assert config.sparsifier is config.collective is config.memory is config.controller is part
        assert config.describe()["sparsifier"] == type(part).__name__


def test_configured_objects_are_kept():
    part = Threshold(min_hits=64)
    assert sparse_config(sparsifier=part).sparsifier is part
    assert sparse_config(memory=Momentum(0.8)).describe()["memory"] == (
        "Momentum(clip_norm=None, masking=True, momentum=0.8, nesterov=False)"
    )


@pytest.mark.parametrize("sparsifier", ["topk", "threshold", TopK()])
def test_illegal_pair(sparsifier):
    with pytest.raises(ValueError, match="needs a sparsifier whose indices are equal on all ranks") as info:
        sparse_config(sparsifier=sparsifier, collective="shared_allreduce")
    assert "random_block" in str(info.value)
    assert "collective=SharedAllReduce" in str(info.value)


def test_the_cheapest_collective_that_fits():
    assert isinstance(sparse_config(sparsifier="topk").collective, OwnerReduce)
    assert isinstance(sparse_config(sparsifier="random_block").collective, SharedAllReduce)
    assert isinstance(sparse_config(sparsifier="random_block", collective="allgather").collective, AllGatherSum)


@pytest.mark.parametrize("sparsifier", [RandomBlock(), "random_block"])
@pytest.mark.parametrize("collective", ["owner_reduce", "hierarchical", OwnerReduce()])
def test_quotas_would_drop_most_of_a_shared_selection(sparsifier, collective):
    with pytest.raises(ValueError, match="limits the entries of every part of the bucket") as info:
        sparse_config(sparsifier=sparsifier, collective=collective)
    assert "choose collective='shared_allreduce'" in str(info.value)
    assert "sparsifier=RandomBlock" in str(info.value)


# How entries are written


@pytest.mark.parametrize(("wire", "type_"), [*FORMATS.items(), (FP16(), FP16)], ids=short_repr)
@pytest.mark.parametrize("collective", [None, "owner_reduce", "allgather", "hierarchical"])
def test_wire_formats(collective, wire, type_):
    collective = sparse_config(collective=collective, wire=wire).collective
    assert type(getattr(collective, "across", collective).wire) is type_


def test_entries_are_exact_by_default():
    assert isinstance(sparse_config().collective.wire, FP32)
    assert isinstance(sparse_config(collective=AllGatherSum("fp16")).collective.wire, FP16)


@pytest.mark.parametrize("collective", [None, "owner_reduce", "allgather"])
@pytest.mark.parametrize("wire", ["fp8", "", 16, FP16, object()], ids=short_repr)
def test_unknown_wire_formats(wire, collective):
    with pytest.raises(ValueError, match="`wire` must be one of 'fp32', 'fp16', 'compact', or an object") as info:
        sparse_config(collective=collective, wire=wire)
    assert f"Received: wire={wire!r}." in str(info.value)


@pytest.mark.parametrize("collective", [None, "shared_allreduce"])
@pytest.mark.parametrize("wire", [name for name in FORMATS if name != "fp32"])
def test_sums_on_the_way_take_no_wire_format(wire, collective):
    with pytest.raises(ValueError, match="`wire` is for collectives that send indices") as info:
        sparse_config(sparsifier="random_block", collective=collective, wire=wire)
    assert f"Received: wire={wire!r} with collective='shared_allreduce'." in str(info.value)


@pytest.mark.parametrize(
    "collective", [OwnerReduce(), AllGatherSum("fp16"), Own()], ids=lambda part: type(part).__name__
)
def test_a_collective_that_is_made_already_has_its_wire_format(collective):
    with pytest.raises(ValueError, match="`wire` belongs to the collective") as info:
        sparse_config(collective=collective, wire="compact")
    assert f"{type(collective).__name__}(wire=...). Received: wire='compact'." in str(info.value)


@pytest.mark.parametrize(
    ("sparsifier", "memory", "rescale"),
    [
        ("random_block", "none", True),
        (RandomBlock(1), NoMemory(), True),
        ("random_block", "residual", False),
        ("random_block", "momentum", False),
        ("topk", "none", False),
    ],
)
def test_only_blind_selections_without_memory_are_rescaled(sparsifier, memory, rescale):
    assert sparse_config(sparsifier=sparsifier, memory=memory).scheme().rescale is rescale


# Schemes without a sparsifier and a collective


@pytest.mark.parametrize("name", sorted(set(registry.METHODS["scheme"]) - {"sparse"}))
def test_every_scheme_is_chosen_by_name(name):
    config = sparse_config(0.05, scheme=name)
    assert type(config.scheme()) is registry.method_class("scheme", name)
    assert config.scheme() is config.scheme()
    assert config.sparsifier is config.collective is None
    assert isinstance(config.memory, Residual)
    assert config.groups == ()


def test_the_usual_scheme_has_a_name_too():
    assert sparse_config(scheme="sparse").describe() == sparse_config().describe()
    assert isinstance(sparse_config(scheme="sparse", sparsifier="topk").sparsifier, TopK)


def test_a_scheme_of_your_own():
    scheme = LowRank(rank=2)
    assert sparse_config(scheme=scheme).scheme() is scheme
    own = type("Scheme", (Own,), {"exact": True, "selects": False})()
    assert sparse_config(scheme=own).scheme() is own
    across = sparse_config(scheme=SparseSum(TopK(), Hierarchical()))
    assert across.groups == ("local", "cross")
    assert across.describe() == sparse_config(sparsifier="topk", collective="hierarchical").describe()


def test_groups_of_ranks_are_those_of_the_collective():
    assert sparse_config(collective="hierarchical").groups == ("local", "cross")
    assert sparse_config().groups == ()


def test_a_scheme_that_does_not_exist():
    with pytest.raises(ValueError, match="`scheme` must be one of") as info:
        sparse_config(scheme="lowrank")
    assert "'low_rank'" in str(info.value)
    with pytest.raises(TypeError, match="`scheme` must be one of"):
        sparse_config(scheme=LowRank)
    with pytest.raises(TypeError, match="has no exact"):
        sparse_config(scheme=Own())


@pytest.mark.parametrize(
    "more", [{"sparsifier": "topk"}, {"collective": "allgather"}, {"wire": "fp16"}], ids=short_repr
)
@pytest.mark.parametrize("scheme", ["low_rank", LowRank()], ids=short_repr)
def test_a_scheme_replaces_sparsifier_collective_and_wire(scheme, more):
    with pytest.raises(ValueError, match="`scheme` replaces `sparsifier`, `collective` and `wire`") as info:
        sparse_config(scheme=scheme, **more)
    (name, value), *_ = more.items()
    assert f"{name}={value!r}" in str(info.value)


def test_a_scheme_is_described():
    words = sparse_config(scheme=LowRank(2, seed=3)).describe()
    assert words["scheme"] == "LowRank(period=50, rank=2, seed=3, tolerance=0.0)"
    assert not {"sparsifier", "collective"} & words.keys()
    assert words != sparse_config(scheme=LowRank(4, seed=3)).describe()


def test_a_scheme_does_not_adapt():
    with pytest.raises(ValueError, match="`scheme` must be 'sparse' here") as info:
        adaptive_config(scheme="low_rank")
    assert "Received: scheme='low_rank'." in str(info.value)
    assert adaptive_config(scheme="sparse").describe() == adaptive_config().describe()


def test_warm_up():
    controller = sparse_config(0.001, warmup_steps=50).controller
    assert isinstance(controller, Warmup)
    assert (controller.density, controller.warmup_steps) == (0.001, 50)


@pytest.mark.parametrize("warmup_steps", [-1, 0.5, True, float("nan"), "5"])
def test_warm_up_out_of_range(warmup_steps):
    with pytest.raises(ValueError, match="`warmup_steps` must be a whole number"):
        sparse_config(warmup_steps=warmup_steps)


def test_a_controller_of_your_own():
    controller = Fixed(0.2)
    assert sparse_config(controller=controller).controller is controller


@pytest.mark.parametrize("more", [{"density": 0.1}, {"warmup_steps": 5}, {"density": 0.1, "warmup_steps": 5}])
def test_a_controller_given_twice(more):
    with pytest.raises(ValueError, match="`controller` replaces `density` and `warmup_steps`"):
        sparse_config(controller=Fixed(0.2), **more)


def test_a_controller_has_no_name():
    with pytest.raises(TypeError, match="`controller` must be an object"):
        sparse_config(controller="warmup")


@pytest.mark.parametrize("value", [0, -1, 0.5, True, float("nan"), float("inf"), "4M"])
def test_bucket_bytes_out_of_range(value):
    with pytest.raises(ValueError, match="`bucket_bytes` must be a whole number"):
        sparse_config(bucket_bytes=value)


@pytest.mark.parametrize("value", [-1, 0.5, 8.0, True, "1k", None])
def test_min_size_out_of_range(value):
    with pytest.raises(ValueError, match="`min_size` must be a number of elements"):
        sparse_config(min_size=value)


@pytest.mark.parametrize("value", [0, -1.0, True, float("nan"), float("inf"), "60", None])
def test_timeout_out_of_range(value):
    with pytest.raises(ValueError, match="`timeout_seconds` must be a positive number"):
        sparse_config(timeout_seconds=value)


def test_numbers_in_range():
    config = sparse_config(bucket_bytes=1e6, min_size=0, timeout_seconds=5)
    assert (config.bucket_bytes, config.min_size, config.timeout_seconds) == (1_000_000, 0, 5.0)


def test_only_density_is_positional():
    with pytest.raises(TypeError):
        sparse_config(0.1, "topk")
    with pytest.raises(TypeError):
        sparse_config(ratio=0.1)


# Ranks compare these words.


def test_description_names_every_setting():
    assert sparse_config(0.05, sparsifier=RandomBlock(3), memory="none", min_size=7).describe() == {
        "sparsifier": "RandomBlock(seed=3)",
        "collective": "SharedAllReduce",
        "memory": "NoMemory",
        "controller": "Fixed(density=0.05)",
        "bucket_bytes": "0",
        "min_size": "7",
        "timeout_seconds": "600.0",
    }


@pytest.mark.parametrize(
    "other",
    [
        {"density": 0.02},
        {"sparsifier": "topk"},
        {"sparsifier": Threshold(min_hits=64)},
        {"sparsifier": "random_block"},
        {"scheme": "low_rank"},
        {"scheme": "sketch"},
        {"collective": "allgather"},
        {"wire": "fp16"},
        {"wire": "compact"},
        {"memory": "none"},
        {"memory": Momentum(0.8)},
        {"warmup_steps": 5},
        {"bucket_bytes": 1024},
        {"min_size": 0},
        {"timeout_seconds": 5},
    ],
    ids=short_repr,
)
def test_description_differs_when_a_setting_does(other):
    assert sparse_config(**other).describe() == sparse_config(**other).describe()
    assert sparse_config(**other).describe() != sparse_config().describe()


def test_description_holds_no_addresses():
    """They differ between ranks that want the same."""

    class Part(Own):
        def __init__(self) -> None:
            self.function = lambda: None
            self.helper = Own()
            self._private = 7

    first, second = (sparse_config(controller=Part()).describe() for _ in range(2))
    assert first == second
    assert first["controller"] == "Part(function=function, helper=Own)"
