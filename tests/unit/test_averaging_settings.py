"""What the user may ask for."""

from __future__ import annotations

import pytest

from hvd_sparse.averaging.settings import check_settings
from hvd_sparse.averaging.trigger import EverySeconds, EverySteps
from hvd_sparse.config import adaptive_config, sparse_config


def test_intervals():
    assert check_settings(every_steps=500).interval == EverySteps(500)
    assert check_settings(every_seconds=0.5).interval == EverySeconds(0.5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "every_steps"),
        ({"every_steps": 1, "every_seconds": 1}, "every_steps"),
        ({"every_steps": 0}, "every_steps"),
        ({"every_steps": 2.5}, "every_steps"),
        ({"every_seconds": 0}, "every_seconds"),
        ({"every_seconds": float("inf")}, "every_seconds"),
        ({"every_steps": 1, "warmup_steps": -1}, "warmup_steps"),
        ({"every_steps": 1, "warmup_steps": 1.5}, "warmup_steps"),
        ({"every_steps": 1, "weights": "rows"}, "weights"),
        ({"every_steps": 1, "buffers": "rank1"}, "buffers"),
        ({"every_steps": 1, "optimizer_state": "mean"}, "optimizer_state"),
        ({"every_steps": 1, "timeout_seconds": 0}, "timeout_seconds"),
    ],
)
def test_values_that_make_no_sense(arguments, named):
    with pytest.raises(ValueError, match=rf"`{named}` must .*Received: {named}="):
        check_settings(**arguments)


def test_sparse():
    assert check_settings(every_steps=1, sparse=sparse_config(0.1)).describe()["sparse"]["sparsifier"]
    with pytest.raises(TypeError, match="`sparse` must be"):
        check_settings(every_steps=1, sparse=0.1)
    with pytest.raises(ValueError, match="`sparse` must have a density of its own"):
        check_settings(every_steps=1, sparse=adaptive_config())
    with pytest.raises(ValueError, match="`sparse` must keep what it does not send"):
        check_settings(every_steps=1, sparse=sparse_config(0.1, memory="momentum"))


def test_settings_that_differ_are_described_differently():
    base = check_settings(every_steps=4).describe()
    others = [{"every_seconds": 4}, {"weights": "steps"}, {"warmup_steps": 1}, {"sparse": sparse_config(0.1)}]
    for other in others:
        assert check_settings(**{"every_steps": None if "every_seconds" in other else 4, **other}).describe() != base
