"""What ranks tell each other adds up to the same answer everywhere, or to "out of step"."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from sentinel.core.types import NOT_MEASURED, Command, CommandKind
from sentinel_hooks.ranks.agreement import (
    MODULUS,
    NOTE_BYTES,
    SPEAKERS,
    Heard,
    Kind,
    Layout,
    Says,
    pack,
    unpack,
)
from sentinel_hooks.ranks.council import Note
from sentinel_hooks.ranks.parted import Done, difference

pytestmark = pytest.mark.torch


def said(
    *ranks: Says,
    seq: int | list[int] = 7,
    layers: int = 0,
    sums: tuple[str, ...] = (),
    maxima: tuple[str, ...] = (),
) -> Heard:
    """What all hear when each rank says one of these."""
    seqs = seq if isinstance(seq, list) else [seq] * len(ranks)
    layout, world = Layout(layers, sums, maxima), len(ranks)
    total = sum(
        pack(says, n, rank, world, layout)
        for rank, (says, n) in enumerate(zip(ranks, seqs, strict=True))
    )
    assert isinstance(total, np.ndarray)
    return unpack(total, world, layout)


def step(**values: Any) -> Says:
    return Says(Kind.STEP, **values)


def test_squares_add_up_losses_are_averaged_and_what_nobody_measured_is_absent() -> None:
    heard = said(
        step(loss=2.0, total_sq=9.0, layer_sq_L=np.array([4.0, 5.0])),
        step(loss=4.0, total_sq=16.0, layer_sq_L=np.array([16.0, 0.0])),
        step(),  # saw nothing
        layers=2,
    )
    assert (heard.loss, heard.total_sq) == (3.0, 25.0)
    assert heard.layer_sq_L is not None
    assert heard.layer_sq_L.tolist() == [20.0, 5.0]
    assert heard.in_step
    nothing = said(step(), step(), layers=2)
    assert (nothing.loss, nothing.total_sq, nothing.layer_sq_L) == (None, None, None)


def test_a_nan_or_an_infinity_of_one_rank_reaches_all_and_spoils_nothing_else() -> None:
    heard = said(
        step(loss=2.0, total_sq=1.0, layer_sq_L=np.array([1.0]), note=b"rates and orders"),
        step(loss=math.nan, total_sq=math.inf, layer_sq_L=np.array([math.inf])),
        layers=1,
    )
    assert math.isnan(heard.loss or 0.0)
    assert heard.total_sq == math.inf
    assert heard.in_step
    assert heard.note == b"rates and orders"


@pytest.mark.parametrize("other", [{"attempt": 2}, {"kind": Kind.VOTE}])
def test_ranks_that_speak_of_different_things_notice_it(other: dict[str, Any]) -> None:
    values: dict[str, Any] = {"kind": Kind.STEP, "attempt": 1}
    assert said(Says(**values), Says(**values)).in_step
    assert not said(Says(**values), Says(**{**values, **other})).in_step
    assert not said(Says(**values), Says(**values), seq=[7, 8]).in_step


@pytest.mark.parametrize("world", [2, 3, 64, 1000])
def test_the_check_is_exact_for_large_numbers_of_ranks_and_steps(world: int) -> None:
    for seq in (MODULUS - 1, MODULUS, 10**9 + 7):
        ranks = [step(attempt=4095)] * world
        assert said(*ranks, seq=seq).in_step
        assert not said(*ranks, seq=[seq] * (world - 1) + [seq + 1]).in_step


def test_one_that_acted_otherwise_is_noticed() -> None:
    assert said(step(action=5), step(action=5)).acted_alike
    assert not said(step(action=5, applied=True), step(action=6)).acted_alike


def test_the_first_ranks_note_arrives_whole_and_only_its() -> None:
    bytes_of_all = bytes(i % 256 for i in range(NOTE_BYTES))
    heard = said(step(note=bytes_of_all), step(note=b"not mine to say"), step())
    assert heard.note == bytes_of_all
    with pytest.raises(ValueError, match="at most"):
        said(step(note=bytes_of_all + b"x"))


def test_a_note_with_orders_survives_the_way() -> None:
    order = Command("c-1", CommandKind.SCALE_LR, 0.5, None, "ann")
    note = Note(lr=3e-4, shape=(4, 8), batch="shard 7, row 12", orders=(order,), saved=500)
    heard = said(step(note=msgspec.msgpack.encode(note)), step())
    assert msgspec.msgpack.decode(heard.note, type=Note) == note


def test_who_voted_no_reads_the_same_on_every_rank() -> None:
    yes, no = Says(Kind.VOTE, ok=True), Says(Kind.VOTE, ok=False)
    assert said(yes, yes, yes).failed == 0
    assert said(yes, yes, no, yes).who_failed() == "rank 2 of 4"
    assert said(no, yes, no).who_failed() == "2 of 3 ranks"


def test_digests_that_differ_are_noticed() -> None:
    a, b = bytes(range(8)), bytes([0, 1, 2, 3, 4, 5, 6, 8])
    assert said(Says(Kind.COMPARE, digest=a), Says(Kind.COMPARE, digest=a)).same_digest
    assert not said(Says(Kind.COMPARE, digest=a), Says(Kind.COMPARE, digest=b)).same_digest


def test_logs_are_compared_by_the_steps_that_ranks_share() -> None:
    def done(step: int, applied: bool, rate: float = 1.0) -> Done:
        return Done(step, "PROCEED" if applied else "SKIP_STEP", applied, rate)

    one = [done(4, True), done(5, False), done(6, True)]
    assert difference([one, one[1:], [done(7, False)]]) == ""
    assert "step 5 was not applied on rank 0 and applied on rank 1" in difference(
        [one, [done(5, True)]]
    )
    assert "learning rate x0.5" in difference([one, [done(6, True, 0.5)]])


def test_parts_are_added_or_the_largest_counts_and_what_nobody_measured_says_so() -> None:
    def rank(squares: float, top: list[float] | None) -> Says:
        parts = {"squares": np.array([squares, 0.0])}
        if top is not None:
            parts["top"] = np.array(top)
        return step(parts=parts)

    heard = said(
        rank(1.0, [-3.0, NOT_MEASURED]),
        rank(2.0, [-4.0, NOT_MEASURED]),
        rank(4.0, None),  # a rank whose probe has failed
        layers=2,
        sums=("squares",),
        maxima=("top",),
    )
    assert heard.parts["squares"].tolist() == [7.0, 0.0]
    assert heard.parts["top"].tolist() == [-3.0, NOT_MEASURED]
    bad = said(
        rank(1.0, [2.0, math.nan]),
        rank(1.0, [9.0, 1.0]),
        layers=2,
        sums=("squares",),
        maxima=("top",),
    )
    assert bad.parts["top"][0] == 9.0
    assert math.isnan(bad.parts["top"][1])


def test_of_many_ranks_each_says_its_maxima_in_turn_and_none_is_left_out() -> None:
    world = 3 * SPEAKERS + 1
    seen = set()
    for seq in range(100, 100 + 4):
        ranks = [step(parts={"top": np.array([float(r)])}) for r in range(world)]
        heard = said(*ranks, seq=seq, layers=1, maxima=("top",))
        seen.add(heard.parts["top"][0])
    assert seen == {3.0, 7.0, 11.0, 12.0}  # the largest of each turn


def test_ranks_that_save_different_steps_notice_it() -> None:
    assert said(step(flying=101), step(flying=101)).same_flight
    assert not said(step(flying=101), step(flying=0)).same_flight
