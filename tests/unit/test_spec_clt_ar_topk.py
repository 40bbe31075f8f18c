"""Check values of shared-index sparsification: STAR-Topk and VAR-Topk (AR-Topk), CLT-k and its filter (ScaleCom)."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    BACK_ENDS,
    E4,
    Ranks,
    assert_bits_equal,
    assert_close,
    assert_conserved,
    assert_same_on_ranks,
    assert_states_equal,
    floats,
    frozen,
    short_repr,
    total_words,
)
from hypothesis import given
from hypothesis import strategies as st
from methods import SIZES, integers, normal

from hvd_sparse import registry
from hvd_sparse.collectives.allgather import AllGatherSum
from hvd_sparse.collectives.hierarchical import Hierarchical
from hvd_sparse.collectives.owner_reduce import OwnerReduce
from hvd_sparse.collectives.shared_allreduce import SharedAllReduce
from hvd_sparse.config import sparse_config
from hvd_sparse.drivers.simulate import Simulator
from hvd_sparse.exchange import Exchange
from hvd_sparse.memories.none import NoMemory
from hvd_sparse.memories.residual import Residual
from hvd_sparse.ops.numpy import NumpyOps
from hvd_sparse.schemes.sparse import SparseSum
from hvd_sparse.sparsifiers.leader import INDEX_CARRIERS, MODES, Leader
from hvd_sparse.sparsifiers.topk import TopK
from hvd_sparse.types import Reduced, Sparse, Spec, World

NAN, INF = float("nan"), float("inf")
TURNS = ("star", "clt")  # the modes in which ranks lead in turn

every_mode = pytest.mark.parametrize("mode", MODES)
every_carrier = pytest.mark.parametrize("carrier", INDEX_CARRIERS)


def ranks_of(leader: Leader, size: int, backend=None, n: int = 16, memory=None) -> Ranks:
    return Ranks(Exchange(Spec("b", n), SparseSum(leader, SharedAllReduce()), memory or Residual()), size, backend)


def nonzero(total: np.ndarray) -> dict[int, float]:
    return {int(index): float(total[index]) for index in np.flatnonzero(total)}


def indices_of(step, backend) -> list[list[int]]:
    """Those that each rank used."""
    return [backend.numpy(reduced.used.indices).tolist() for reduced in step.reduced]


# The numbers on E4


@every_carrier
@pytest.mark.parametrize("mode", TURNS)
@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (0, {7: 3, 8: -3, 12: 34, 13: -16}),
        (1, {2: -7, 6: -44, 7: 3, 9: -5}),
        (2, {0: 17, 8: -3, 9: -5, 12: 34}),
        (3, {0: 17, 6: -44, 11: 11, 12: 34}),
    ],
)
def test_e4(root, expected, mode, carrier, backend):
    ranks = ranks_of(Leader(mode, carrier), 4, backend)
    ranks.number = root + 8  # in the third round of turns
    step = ranks.step(E4, 4)
    assert indices_of(step, backend) == [list(expected)] * 4
    assert nonzero(step.totals[0]) == expected
    assert_same_on_ranks(step.totals)
    assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
    if root == 0:
        assert [float(np.abs(kept).sum()) for kept in step.kept] == [78, 104, 93, 95]
    assert total_words(step.rounds, 4) == (4 + 6 if carrier == "broadcast" else 6 + 6)


@every_carrier
@pytest.mark.parametrize("mode", TURNS)
def test_four_steps_with_the_same_gradients(mode, carrier, backend):
    ranks, seen = ranks_of(Leader(mode, carrier), 4, backend), []
    for _ in range(4):
        step = ranks.step(E4, 4)
        assert_same_on_ranks(step.totals)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
        seen.append(nonzero(step.totals[0]))
    assert [list(total) for total in seen] == [[7, 8, 12, 13], [1, 2, 6, 9], [0, 5, 8, 14], [3, 4, 11, 12]]
    assert [list(total.values()) for total in seen] == [
        [3, -3, 34, -16],
        [-84, -14, -88, -10],
        [51, 6, -6, 60],
        [-124, -8, 44, 102],
    ]


@every_carrier
def test_var_takes_the_first_of_equals(carrier, backend):
    assert {float(np.sum(np.sort(np.abs(x))[-4:] ** 2)) for x in E4} == {846}
    step = ranks_of(Leader("var", carrier), 4, backend).step(E4, 4)
    assert indices_of(step, backend) == [[7, 8, 12, 13]] * 4
    assert nonzero(step.totals[0]) == {7: 3, 8: -3, 12: 34, 13: -16}
    assert total_words(step.rounds, 4) == (13 if carrier == "broadcast" else 15)


@every_carrier
def test_var_takes_the_largest(carrier, backend):
    scaled = [*E4[:2], frozen(100 * E4[2]), E4[3]]
    assert float(np.sum(np.sort(np.abs(scaled[2]))[-4:] ** 2)) == 8_460_000
    step = ranks_of(Leader("var", carrier), 4, backend).step(scaled, 4)
    assert indices_of(step, backend) == [[0, 8, 9, 12]] * 4
    assert_same_on_ranks(step.totals)
    assert_conserved(step.accumulated, step.totals[0], step.kept, 0)


# Who leads


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(
    ("largest", "root"),
    [
        ((0, 0, 0), 0),
        ((1, 5, 5), 1),
        ((1, 2, -5), 2),
        ((5, 5, 5), 0),
        ((1, INF, INF), 1),
        ((3e38, 1e30, -INF), 0),  # the squares of all three overflow
        ((INF, 1, NAN), 2),  # NaN counts as the largest
        ((1, NAN, NAN), 1),
        ((1, -NAN, INF), 1),  # a NaN with a sign
        ((1e-30, 0, 1e-18), 2),
        ((1, np.nextafter(np.float32(1), np.float32(2)), 1), 1),  # by one bit
    ],
)
@every_carrier
def test_the_leader_of_var(largest, root, carrier, backend):
    """Rank r has its largest value at index r."""
    inputs = [np.zeros(5, np.float32) for _ in largest]
    for rank, value in enumerate(largest):
        inputs[rank][rank] = value
    programs = [
        Leader("var", carrier).select(backend.ops, World(r, 3), Spec("b", 5), backend.array(frozen(inputs[r])), 1, {})
        for r in range(3)
    ]
    for indices, state in Simulator(3, ops=backend.ops).run(programs):
        assert backend.numpy(indices).tolist() == [root]
        assert backend.numpy(indices).dtype == np.int32
        assert state == {}


@every_carrier
@pytest.mark.parametrize("mode", TURNS)
@pytest.mark.parametrize("size", SIZES)
def test_ranks_lead_in_turn(mode, carrier, size, backend):
    """0, 1, ... P - 1, 0: what all use is the top-k of whose turn it is."""
    ranks, part = ranks_of(Leader(mode, carrier), size, backend, 101), BACK_ENDS["numpy"]().ops
    for number in range(size + 1):
        step = ranks.step(normal(number, size, 101), 7)
        leading = part.top_abs(step.accumulated[number % size], 7).tolist()
        assert indices_of(step, backend) == [leading] * size
        assert_same_on_ranks(step.totals)


@pytest.mark.parametrize("size", SIZES)
@every_carrier
def test_var_leads_by_energy(carrier, size, quick_backend):
    ranks, ops = ranks_of(Leader("var", carrier), size, quick_backend, 101), NumpyOps()
    roots = set()
    for number in range(8):
        step = ranks.step(normal(number, size, 101), 7)
        selected = [ops.top_abs(x, 7) for x in step.accumulated]
        root = int(np.argmax([ops.norm_squared(x[own]) for x, own in zip(step.accumulated, selected)]))
        assert indices_of(step, quick_backend) == [selected[root].tolist()] * size
        roots.add(root)
    assert len(roots) > 1 or size == 1


def test_only_the_leader_selects():
    """Where the step is a number. A selection costs more than all the rest."""

    class Counting(NumpyOps):
        def __init__(self):
            self.count = 0

        def top_abs(self, x, k):
            self.count += 1
            return super().top_abs(x, k)

    for mode, expected in (("star", [0, 1, 0, 0]), ("clt", [0, 1, 0, 0]), ("var", [1] * 4)):
        ops = [Counting() for _ in E4]
        programs = [Leader(mode).select(ops[r], World(r, 4, 5), Spec("b", 16), E4[r], 4, {}) for r in range(4)]
        Simulator(4).run(programs)
        assert [one.count for one in ops] == expected


# Invariants


@every_carrier
@every_mode
@given(data=st.data())
def test_conservation_and_equal_bits(mode, carrier, quick_backend, data):
    size, n = data.draw(st.sampled_from(SIZES), "ranks"), data.draw(st.integers(1, 24), "n")
    k, seed = data.draw(st.integers(1, n), "k"), data.draw(st.integers(0, 999), "seed")
    ranks = ranks_of(Leader(mode, carrier), size, quick_backend, n)
    for number in range(3):
        step = ranks.step(integers(seed + number, size, n, limit=3), k)
        assert_same_on_ranks(step.totals)
        assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
        if k < n:
            assert_same_on_ranks([quick_backend.numpy(one.used.indices) for one in step.reduced], "indices")
            assert all(step.num_used(rank) == k for rank in range(size))


@every_mode
@every_carrier
@pytest.mark.parametrize("size", SIZES)
def test_equal_gradients_make_it_plain_top_k(mode, carrier, size, quick_backend):
    """With error feedback, over several steps."""
    ranks = ranks_of(Leader(mode, carrier), size, quick_backend, 101)
    plain = Ranks(Exchange(Spec("b", 101), SparseSum(TopK(), AllGatherSum()), Residual()), size, quick_backend)
    for number in range(6):
        grads = normal(number, 1, 101) * size
        step, other = ranks.step(grads, 7), plain.step(grads, 7)
        assert_bits_equal(step.totals[0], other.totals[0])
        for kept, expected in zip(step.kept, other.kept):
            assert_bits_equal(kept, expected)


@every_carrier
@every_mode
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_words_and_rounds(mode, carrier, size, quick_backend):
    ranks = ranks_of(Leader(mode, carrier), size, quick_backend, 1009)
    k, rounds = 100, []
    for number in range(3):
        step = ranks.step(normal(number, size), k)
        indices = (k if size > 1 else 0) if carrier == "broadcast" else 2 * k * (size - 1) / size
        expected = indices + 2 * k * (size - 1) / size + (size - 1 if mode == "var" else 0)
        assert total_words(step.rounds, size) == expected
        rounds.append([(one.kind, one.tag, one.shape) for one in step.rounds])
    kind = {"broadcast": "Broadcast", "allreduce": "AllReduce"}[carrier]
    shared = [(kind, "indices.k100", (100,)), ("AllReduce", "values.k100", (100,))]
    assert rounds == [([("AllGather", "energies", (1,))] if mode == "var" else []) + shared] * 3


@every_mode
@every_carrier
def test_a_leader_that_has_only_zeros(mode, carrier, backend):
    """Its indices are legal, and the sum there may be anything."""
    step = ranks_of(Leader(mode, carrier), 3, backend, 5).step([floats(0, 0, 0, 0, 0)] * 3, 2)
    assert step.totals[0].tolist() == [0] * 5
    ranks = ranks_of(Leader(mode, carrier), 2, backend, 3)
    step = ranks.step([floats(0, 0, 0), floats(1, 2, 3)], 2)
    assert_conserved(step.accumulated, step.totals[0], step.kept, 0)
    assert_same_on_ranks(step.totals)
    assert all(step.num_used(rank) == 2 for rank in range(2))


@every_mode
@every_carrier
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("number", [0, 1, 2], ids=lambda number: f"leader {number}")
@pytest.mark.parametrize("memory", [Residual(), Residual(0.1), NoMemory()], ids=["residual", "filter", "none"])
def test_nan_is_seen_by_all(memory, number, mode, carrier, quick_backend):
    """On the leader as on the others, wherever it is; indices stay legal, and nothing of it is kept."""
    ranks = ranks_of(Leader(mode, carrier), 3, quick_backend, 1009, memory)
    ranks.step(integers(0, 3), 100)
    before = [ranks.numpy_state(state) for state in ranks.states]
    for value, places in ((NAN, [1008]), (-NAN, [1008]), (INF, [1008]), (-INF, range(1, 1009, 2)), (NAN, range(1009))):
        kind, grads = f"{value} at {places}", [np.array(grad) for grad in normal(5, 3)]
        grads[1][places] = value
        ranks.number = number
        step = ranks.step([frozen(grad) for grad in grads], 100)
        assert step.finite == [False] * 3
        assert all(not np.isfinite(total).all() for total in step.totals), kind
        indices = indices_of(step, quick_backend)
        assert indices == [indices[0]] * 3
        assert len(set(indices[0])) == 100
        assert 0 <= min(indices[0]) <= max(indices[0]) < 1009
        for rank, state in enumerate(ranks.states):
            assert_states_equal(ranks.numpy_state(state), before[rank], f"{kind}, state of rank {rank}")


# The filter of ScaleCom


@pytest.mark.parametrize(("beta", "expected"), [(1.0, [3, 1, -1, 0]), (1, [3, 1, -1, 0]), (0.1, [1.2, 0.1, -1.9, 0])])
def test_filter(beta, expected, backend):
    memory = Residual(beta)
    ranks = ranks_of(Leader("clt"), 1, backend, 4, memory)
    ranks.states[0]["memory"]["residual"] = backend.array(floats(1, 0, -2, 0))
    step = ranks.step([floats(2, 1, 1, -4)], 1)
    assert indices_of(step, backend) == [[3]]
    assert_close(step.kept[0], expected, 1e-6)


def filter_state(backend, *values: float) -> dict:
    """What stands in "before" has no meaning between steps."""
    return {"residual": backend.array(floats(*values)), "before": backend.array(floats(*[NAN] * len(values)))}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.999])
def test_filter_over_several_steps(beta, in_place, backend):
    """(1 - beta) e + beta (x - sent), with `out` as the torch front gives it and without."""
    memory, rng = Residual(beta), np.random.default_rng(0)
    state, expected = filter_state(backend, 1, 0, -2, 0), np.float64([1, 0, -2, 0])
    spare = filter_state(backend, 7, 7, 7, 7) if in_place else None
    for number in range(5):
        grad, index = frozen(rng.normal(size=4), np.float32), number % 4
        before = np.array(backend.numpy(state["residual"]))
        x, reached = memory.compensate(backend.ops, 1, backend.array(grad), state, 0.5, spare)
        assert reached.keys() == set(memory.keys)
        assert_bits_equal(backend.numpy(state["residual"]), before)
        assert_bits_equal(backend.numpy(reached["before"]), before)
        assert_close(backend.numpy(x), expected + 0.5 * grad, 1e-6)
        sent = backend.array(frozen([index], np.int64))
        used = Sparse(sent, backend.ops.gather(x, sent), 4)
        rest = expected + 0.5 * grad
        rest[index] = 0
        after = memory.update(backend.ops, Reduced(None, used, True), reached)
        assert_bits_equal(backend.numpy(state["residual"]), before)
        expected = (1 - beta) * expected + beta * rest
        assert_close(backend.numpy(after["residual"]), expected, 1e-6)
        state, spare = after, state if in_place else None


def test_filter_of_what_a_collective_leaves(backend):
    """Everything sent, a rounding error left, and a collective that says itself what stays."""
    memory, used = Residual(0.5), Sparse(backend.array(frozen([0], np.int64)), backend.array(floats(4)), 2)
    for reduced, expected in (
        (Reduced(None, None, True), [1, 2]),
        (Reduced(None, used, True), [1, 2 + 2.5]),
        (Reduced(None, used, True, left=backend.array(floats(0.5))), [1.25, 2 + 2.5]),
        (Reduced(None, used, True, kept=backend.array(floats(6, 8))), [4, 6]),
    ):
        x, state = memory.compensate(backend.ops, 1, backend.array(floats(2, 1)), filter_state(backend, 2, 4))
        assert backend.numpy(x).tolist() == [4, 5]
        kept = None if reduced.kept is None else np.array(backend.numpy(reduced.kept))
        assert backend.numpy(memory.update(backend.ops, reduced, state)["residual"]).tolist() == expected
        if kept is not None:
            assert_bits_equal(backend.numpy(reduced.kept), kept)


def test_without_filter_there_is_one_array(backend):
    memory, state = Residual(1.0), {"residual": backend.array(floats(1, 2))}
    assert memory.keys == Residual().keys == ("residual",)
    x, reached = memory.compensate(backend.ops, 1, backend.array(floats(1, 1)), state)
    assert reached["residual"] is x
    assert memory.update(backend.ops, Reduced(None, None, True), reached).keys() == {"residual"}


def test_the_filter_is_not_conservative(backend):
    steps = [ranks_of(Leader("clt"), 4, backend, 16, Residual(beta)).step(E4, 4) for beta in (1.0, 0.1)]
    assert_conserved(steps[0].accumulated, steps[0].totals[0], steps[0].kept, 0)
    with pytest.raises(AssertionError, match="not conserved"):
        assert_conserved(steps[1].accumulated, steps[1].totals[0], steps[1].kept)


def test_a_dense_bucket_needs_no_filter(backend):
    memory = Residual(0.1)
    assert memory.for_dense().keys == ()
    ranks = ranks_of(Leader(), 2, backend, 3, memory)
    for _ in range(3):
        step = ranks.step([floats(1, 2, 3)] * 2, 3)
        assert step.totals[0].tolist() == [2, 4, 6]
        assert not np.any(step.kept)


@pytest.mark.parametrize("beta", [0, 0.0, -0.1, 1.5, NAN, INF, True, "0.1", None], ids=short_repr)
def test_beta_out_of_range(beta):
    with pytest.raises(ValueError, match=r"`beta` must be in \(0, 1\]\. Received: beta="):
        Residual(beta)


# In a TensorFlow graph


@pytest.mark.parametrize("memory", [Residual(), Residual(0.1)], ids=["residual", "filter"])
@every_mode
def test_traced_once(mode, memory):
    """The step is a tensor, so the leader is one, too. The oracle says what comes out."""
    import tensorflow as tf

    from hvd_sparse.ops.tensorflow import TensorFlowOps

    ops, traces = TensorFlowOps(), []
    oracle = ranks_of(Leader(mode), 3, n=101, memory=memory)
    states = [{"memory": {key: tf.zeros([101]) for key in memory.keys}, "scheme": {}} for _ in range(3)]

    @tf.function(autograph=False)
    def exchange(grads, states, number):
        traces.append(mode)
        simulator = Simulator(3, ops=ops)
        programs = [
            oracle.exchange.step(ops, World(rank, 3, number), grads[rank], 7, states[rank]) for rank in range(3)
        ]
        results = simulator.run(programs)
        return [(reduced.total, reduced.used.indices) for reduced, _ in results], [state for _, state in results]

    for number in (0, 1, 2, 3, 2**40, 2**40 + 1):
        oracle.number = number
        grads = normal(number % 1000, 3, 101)
        expected = oracle.step(grads, 7)
        found, states = exchange([tf.constant(grad) for grad in grads], states, tf.constant(number, tf.int64))
        for rank, (total, indices) in enumerate(found):
            assert indices.numpy().tolist() == expected.reduced[rank].used.indices.tolist()
            assert_close(total.numpy(), expected.totals[0], 1e-6)
            assert_close(states[rank]["memory"]["residual"].numpy(), expected.kept[rank], 1e-6)
    assert len(traces) == 1


@every_mode
def test_no_broadcast_in_a_graph(mode):
    import tensorflow as tf

    from hvd_sparse.ops.tensorflow import TensorFlowOps

    @tf.function(autograph=False)
    def traced(x, step):
        programs = [
            Leader(mode, "broadcast").select(TensorFlowOps(), World(r, 2, step), Spec("b", 3), x, 1, {}) for r in (0, 1)
        ]
        return Simulator(2, ops=TensorFlowOps()).run(programs)

    with pytest.raises(ValueError, match="`index_carrier` must be 'allreduce' in a TensorFlow graph"):
        traced(tf.constant([1.0, 2.0, 3.0]), tf.constant(0, tf.int64))


# What may be asked for


@pytest.mark.parametrize("mode", ["STAR", "", None, 1, True, ["star"]], ids=short_repr)
def test_no_such_mode(mode):
    with pytest.raises(ValueError) as info:
        Leader(mode)
    assert str(info.value) == f"`mode` must be one of 'star', 'clt', 'var'. Received: mode={mode!r}."


@pytest.mark.parametrize("carrier", ["allgather", "", None, 1], ids=short_repr)
def test_no_such_carrier(carrier):
    with pytest.raises(ValueError) as info:
        Leader(index_carrier=carrier)
    assert str(info.value) == (
        f"`index_carrier` must be one of 'allreduce', 'broadcast'. Received: index_carrier={carrier!r}."
    )


def test_pairs():
    for collective in (OwnerReduce(), Hierarchical()):
        with pytest.raises(ValueError, match=r"choose collective='shared_allreduce'.*sparsifier=Leader"):
            SparseSum(Leader(), collective)
    for collective in (SharedAllReduce(), AllGatherSum()):
        assert SparseSum(Leader(), collective).sparsifier.mode == "star"
    config = sparse_config(sparsifier="leader")
    assert (type(config.sparsifier), type(config.collective)) == (Leader, SharedAllReduce)
    assert config.describe()["sparsifier"] == "Leader(index_carrier='allreduce', mode='star')"
    assert registry.create("sparsifier", "leader", mode="var").mode == "var"


def test_allgathered_values_at_shared_indices(backend):
    """Legal, at more words: the sum is the same."""
    shared, gathered = (
        Ranks(Exchange(Spec("b", 16), SparseSum(Leader(), collective), Residual()), 4, backend).step(E4, 4)
        for collective in (SharedAllReduce(), AllGatherSum())
    )
    assert_bits_equal(gathered.totals[0], shared.totals[0])
    assert total_words(gathered.rounds, 4) == 6 + 24
