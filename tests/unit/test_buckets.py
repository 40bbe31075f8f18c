"""Which parameters travel together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.buckets import Layout, Parameter, plan_buckets, split_evenly


def matrix(name: str, size: int, place: str = "cpu", itemsize: int = 4) -> Parameter:
    return Parameter(name, (size, 1), place, itemsize)


def names(layouts: list[Layout]) -> list[list[str]]:
    return [[member.name for member in layout.members] for layout in layouts]


def test_reverse_order_of_registration():
    layouts = plan_buckets([matrix(name, 10) for name in "abc"], 1000, 0)
    assert names(layouts) == [["c", "b", "a"]]
    assert [(member.start, member.size) for member in layouts[0].members] == [(0, 10), (10, 10), (20, 10)]
    assert (layouts[0].spec.name, layouts[0].spec.size, layouts[0].dense) == ("b0", 30, False)


def test_a_bucket_is_closed_before_it_grows_beyond_the_limit():
    parameters = [matrix(name, 10) for name in "abcde"]
    assert names(plan_buckets(parameters, 80, 0)) == [["e", "d"], ["c", "b"], ["a"]]
    assert names(plan_buckets(parameters, 79, 0)) == [["e"], ["d"], ["c"], ["b"], ["a"]]
    assert names(plan_buckets(parameters, 81, 0)) == [["e", "d"], ["c", "b"], ["a"]]


def test_a_large_parameter_has_a_bucket_of_its_own():
    parameters = [matrix("a", 10), matrix("large", 1000), matrix("b", 10)]
    assert names(plan_buckets(parameters, 320, 0)) == [["b"], ["large"], ["a"]]


def test_a_bucket_that_is_hardly_begun_waits_for_a_large_parameter():
    parameters = [matrix("a", 10), matrix("large", 1000), matrix("b", 10)]
    assert names(plan_buckets(parameters, 321, 0)) == [["b", "large"], ["a"]]


def test_item_sizes_count():
    halves = [matrix(name, 10, itemsize=2) for name in "ab"]
    assert names(plan_buckets(halves, 40, 0)) == [["b", "a"]]
    doubles = [matrix(name, 10, itemsize=8) for name in "ab"]
    assert names(plan_buckets(doubles, 100, 0)) == [["b"], ["a"]]


def test_places_are_not_mixed():
    layouts = plan_buckets([matrix("a", 9, "cpu"), matrix("b", 9, "gpu"), matrix("c", 9, "cpu")], 1000, 0)
    assert sorted(names(layouts)) == [["b"], ["c", "a"]]


@pytest.mark.parametrize(
    ("parameter", "dense"),
    [
        (Parameter("p", (50, 20), "cpu"), False),
        (Parameter("p", (1000,), "cpu"), True),  # a bias
        (Parameter("p", (), "cpu"), True),  # a scalar
        (Parameter("p", (3, 33), "cpu"), True),
        (Parameter("p", (5, 2, 2, 5), "cpu"), False),
        (Parameter("p", (50, 20), "cpu", lossless=True), True),
    ],
)
def test_what_is_not_worth_compressing(parameter, dense):
    (layout,) = plan_buckets([parameter], 1000, 100)
    assert layout.dense is dense


def test_dense_and_compressed_parameters_are_not_mixed():
    layouts = plan_buckets([matrix("w", 100), Parameter("b", (5,), "cpu"), matrix("v", 100)], 10_000, 10)
    assert {tuple(names([layout])[0]): layout.dense for layout in layouts} == {("v", "w"): False, ("b",): True}


def test_groups_share_a_bucket_whatever_its_size():
    parameters = [matrix(name, 10) for name in "abcd"]
    layouts = plan_buckets(parameters, 40, 0, groups=[["a", "d", "c"]])
    assert sorted(names(layouts)) == [["b"], ["d", "c", "a"]]


def test_groups_do_not_mix_places():
    layouts = plan_buckets([matrix("a", 10), matrix("b", 10, "gpu")], 1000, 0, groups=[["a", "b"]])
    assert sorted(names(layouts)) == [["a"], ["b"]]


def test_numbers_continue():
    layouts = plan_buckets([matrix(name, 10) for name in "ab"], 40, 0, first=3)
    assert [layout.spec.name for layout in layouts] == ["b3", "b4"]


def test_nothing_to_plan():
    assert plan_buckets([], 100, 0) == []


parameters = st.lists(
    st.builds(
        Parameter,
        name=st.just(""),
        shape=st.lists(st.integers(1, 7), max_size=3).map(tuple),
        place=st.sampled_from(["cpu", "gpu"]),
        itemsize=st.sampled_from([2, 4]),
        lossless=st.booleans(),
    ),
    max_size=20,
).map(lambda found: [Parameter(**{**vars(p), "name": f"p{number}"}) for number, p in enumerate(found)])


@given(parameters, st.integers(1, 400), st.integers(0, 30), st.lists(st.integers(0, 19), unique=True, max_size=6))
def test_any_model(found, bucket_bytes, min_size, numbers):
    """Everybody is in exactly one bucket, the parts touch, and only groups and large parameters exceed the limit."""
    groups = [[f"p{number}" for number in numbers]]
    layouts = plan_buckets(found, bucket_bytes, min_size, groups)
    by_name = {parameter.name: parameter for parameter in found}
    assert sorted(member.name for layout in layouts for member in layout.members) == sorted(by_name)
    assert [layout.spec.name for layout in layouts] == [f"b{number}" for number in range(len(layouts))]
    for layout in layouts:
        inside = [by_name[member.name] for member in layout.members]
        assert [member.size for member in layout.members] == [parameter.size for parameter in inside]
        ends = [member.start + member.size for member in layout.members]
        assert [member.start for member in layout.members] == [0, *ends[:-1]]
        assert layout.spec.size == ends[-1]
        assert layout.spec.shapes == tuple(parameter.shape for parameter in inside)
        assert len({parameter.place for parameter in inside}) == 1
        num_bytes = sum(parameter.size * parameter.itemsize for parameter in inside)
        begun = num_bytes - inside[-1].size * inside[-1].itemsize
        assert num_bytes <= bucket_bytes or 8 * begun < bucket_bytes or inside[0].name in groups[0]
        small = {p.lossless or len(p.shape) < 2 or p.size < min_size for p in inside}
        assert small == {layout.dense}


@given(parameters)
def test_the_plan_is_the_same_every_time(found):
    assert plan_buckets(found, 100, 5) == plan_buckets(list(found), 100, 5)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 8))
def test_split_evenly(sizes, num_groups):
    groups = split_evenly([matrix(f"p{number}", size) for number, size in enumerate(sizes)], num_groups)
    assert len(groups) == num_groups
    assert [name for group in groups for name in group] == [f"p{number}" for number in range(len(sizes))]
    shares = [sum(sizes[int(name[1:])] for name in group) for group in groups]
    assert max(shares) <= sum(sizes) / num_groups + max(sizes)


def test_split_evenly_by_size_and_not_by_number():
    parts = [matrix("a", 90), matrix("b", 10), matrix("c", 50), matrix("d", 50)]
    assert split_evenly(parts, 2) == [["a", "b"], ["c", "d"]]
