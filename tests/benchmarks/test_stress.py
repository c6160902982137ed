"""benchmarks/stress.py: a small version of it, and that it finds what it is there for."""

from __future__ import annotations

import multiprocessing as mp

import pytest

from benchmarks import stress, stress_rank
from benchmarks.stress_rank import Case, Outcome, draw
from lightning_compress.testing import SimulatedExchange
from tests.ranks import run_ranks


def test_what_is_drawn_is_reproducible_and_holds_everything() -> None:
    cases = draw(300, 8, 0)
    assert repr(cases) == repr(draw(300, 8, 0)) != repr(draw(300, 8, 1))
    assert {case.ranks_per_node for case in cases} == {1, 2, 4}
    assert {case.dtype for case in cases} == set(stress_rank.FORMATS)
    assert {len(case.shapes) for case in cases} >= {1, 2, 50}
    assert {type(case.arguments["compressor"]).__name__ for case in cases} >= {"Quantize", "TopK", "OneBit", "Cast"}
    ways = {case.arguments["exchange"] for case in cases}
    assert ways >= {"auto", "two_way", "all_gather", "all_reduce", "hierarchical", "hierarchical_two_way"}
    memories = {str(case.arguments["memory"]).partition("(")[0] for case in cases}
    assert memories == {"auto", "none", "error_feedback", "MomentumCorrection"}


def small(count: int, world_size: int) -> list[Case]:
    """Those whose kernels every rank of the tests has loaded."""
    return [case for case in draw(4 * count, world_size, 7) if case.dtype == "float32"][:count]


def stressed(cases: list[Case]) -> tuple[list[Outcome], list[Outcome]]:
    as_they_are = list(stress_rank.outcomes(cases))
    with pytest.MonkeyPatch.context() as patch:
        mean = SimulatedExchange.mean
        patch.setattr(SimulatedExchange, "mean", lambda *args: {n: 2.0 * g for n, g in mean(*args).items()})
        otherwise = list(stress_rank.outcomes(cases[:2]))
    return as_they_are, otherwise


@pytest.mark.parametrize(("world_size", "count"), [(3, 6), (4, 10)])
def test_random_exchanges_equal_their_simulation(world_size: int, count: int) -> None:
    found = run_ranks(stressed, world_size, small(count, world_size))
    assert all(one == found[0] for one in found)
    outcomes, otherwise = found[0]
    assert [outcome.differs for outcome in outcomes] == [""] * count
    assert sum(outcome.bits for outcome in outcomes) >= 2
    assert max(outcome.buckets for outcome in outcomes) > 20
    assert len({outcome.way for outcome in outcomes}) >= 2
    assert all(outcome.differs.startswith("step 0") for outcome in otherwise)


def test_silence_is_a_deadlock_that_is_named_and_so_is_a_rank_that_dies() -> None:
    case = draw(1, 2, 0)[0]
    ours, theirs = mp.Pipe(duplex=False)
    with pytest.raises(RuntimeError, match=r"a deadlock: not finished after 0 s: Case\(number=0, world_size=2"):
        stress.listen(ours, [case], 0.1, lambda _: None)
    outcome = Outcome("two_way", 1, 3, True, "")
    theirs.send(outcome)
    theirs.close()
    with pytest.raises(RuntimeError, match=r"a rank has failed, see above, in Case\(number=0"):
        stress.listen(ours, [case, case], 1.0, lambda _: None)


def test_a_row_counts() -> None:
    outcomes = [
        Outcome("two_way", 3, 9, True, ""),
        Outcome("all_reduce", 5, 15, False, ""),
        Outcome("none", 1, 3, True, "x"),
    ]
    row = stress.row(3, draw(3, 3, 0), outcomes, 1.26)
    assert row["ways"] == {"two_way": 1, "all_reduce": 1, "none": 1}
    counts = ("equal_bits", "equal_but_order_of_sums", "different", "least_buckets", "most_buckets", "bucket_exchanges")
    assert [row[key] for key in counts] == [1, 1, 1, 1, 5, 27]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks must be 2 or more"),
        (["--exchanges", "1"], "--exchanges must be at least one for each of --ranks"),
        (["--limit", "0"], "--limit must be positive"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        stress.main(arguments)
    assert message in capsys.readouterr().err
