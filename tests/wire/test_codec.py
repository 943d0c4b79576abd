"""The codec keeps every value: round trips, canonical bytes, NaN and inf, readable errors."""

from __future__ import annotations

import dataclasses
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core.errors import ProtocolError
from sentinel.core.events import (
    AutomationSet,
    Restored,
    RestoreFailed,
    SnapshotLost,
    SnapshotTaken,
)
from sentinel.core.policy import Policy
from sentinel.core.state import Counters, Incident, Ledger, RuleMemory, Snapshot, State, Stats
from sentinel.core.types import (
    Action,
    CanaryAnswer,
    Command,
    CommandKind,
    Decision,
    Finding,
    IncidentState,
    Observation,
    Outcome,
    Protection,
    Readings,
    Severity,
    Status,
)
from sentinel.wire import codec

FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=64)
STEPS = st.integers(0, 2**60)
COLUMN = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(
    lambda bits: np.array(bits, dtype="<u4").view("<f4")
)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    base = draw(
        st.builds(
            Observation,
            step=STEPS,
            loss=st.none() | FLOATS,
            grad_norm=st.none() | FLOATS,
            lr=st.none() | FLOATS,
            loss_scale=st.none() | FLOATS,
            params_finite=st.none() | st.booleans(),
            shape=st.lists(STEPS, max_size=3).map(tuple),
            canary=st.none() | st.builds(CanaryAnswer, STEPS, FLOATS, FLOATS),
            commands=st.lists(
                st.builds(Command, st.text(), st.sampled_from(CommandKind), FLOATS), max_size=2
            ).map(tuple),
            blind=st.booleans(),
            batch_id=st.text(max_size=5),
        )
    )
    return dataclasses.replace(base, columns=draw(st.dictionaries(st.text(max_size=4), COLUMN)))


DECISIONS = st.builds(
    Decision,
    step=STEPS,
    action=st.sampled_from(Action),
    rule=st.text(max_size=4),
    reason=st.text(max_size=4),
    would=st.sampled_from(Action),
    target=st.none() | STEPS,
    lr_factor=FLOATS,
    keep_batch=st.booleans(),
    drop_canaries=st.booleans(),
    take_snapshot=st.booleans(),
    findings=st.lists(
        st.builds(Finding, st.text(), st.sampled_from(Severity), st.text(), st.none() | FLOATS),
        max_size=2,
    ).map(tuple),
    readings=st.builds(
        Readings,
        FLOATS,
        st.integers(0, 3),
        st.none() | FLOATS,
        st.sampled_from(Status),
        st.none() | FLOATS,
        st.none() | FLOATS,
        FLOATS,
        st.booleans(),
        st.sampled_from(Protection),
    ),
    memo=st.just(object()),
)
LEDGERS = st.builds(
    Ledger,
    attempt=STEPS,
    skips=st.lists(STEPS, max_size=3).map(tuple),
    last_target=st.none() | STEPS,
    manual_lr=FLOATS,
    snapshots=st.lists(st.builds(Snapshot, STEPS, st.booleans()), max_size=2).map(tuple),
    incidents=st.lists(
        st.builds(
            Incident,
            STEPS,
            st.text(),
            st.sampled_from(IncidentState),
            st.sampled_from(Severity),
            STEPS,
            STEPS,
            st.text(),
            actions=st.lists(st.tuples(STEPS, st.text(), st.text()), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    rules=st.lists(st.tuples(st.text(), st.builds(RuleMemory, STEPS)), max_size=2).map(tuple),
    counters=st.builds(
        Counters, STEPS, st.lists(st.tuples(st.text(), STEPS), max_size=2).map(tuple)
    ),
)
STATES = st.builds(State, STEPS, st.just(Stats()), LEDGERS)


def same_float(a: float | None, b: float | None) -> bool:
    """Equal bits: NaN equals NaN, and 0.0 does not equal -0.0."""
    if a is None or b is None:
        return a is b
    return struct.pack("<d", a) == struct.pack("<d", b)


def test_a_nan_loss_and_an_infinite_norm_arrive_as_they_left() -> None:
    sent = Observation(7, loss=math.nan, grad_norm=math.inf, lr=-math.inf)
    got = codec.decode_observation(codec.encode_observation(sent))
    assert math.isnan(got.loss or 0.0)
    assert (got.grad_norm, got.lr, got.loss_scale) == (math.inf, -math.inf, None)


def test_a_column_travels_as_its_raw_little_endian_float32_bytes() -> None:
    column = np.array([1.5, math.nan, -math.inf], dtype=np.float32)
    data = codec.encode_observation(Observation(0, columns={"layer_grad_norm": column}))
    assert struct.pack("<3f", *column) in data
    got = codec.decode_observation(data).columns["layer_grad_norm"]
    assert got.dtype == np.float32
    assert got.tobytes() == column.tobytes()


@settings(max_examples=60, deadline=None)
@given(observations())
def test_any_observation_round_trips_bit_for_bit(sent: Observation) -> None:
    data = codec.encode_observation(sent)
    got = codec.decode_observation(data)
    assert codec.encode_observation(got) == data
    for name in ("loss", "grad_norm", "lr", "loss_scale"):
        assert same_float(getattr(got, name), getattr(sent, name))
    assert (got.step, got.shape, got.blind, got.batch_id, got.params_finite) == (
        sent.step,
        sent.shape,
        sent.blind,
        sent.batch_id,
        sent.params_finite,
    )
    assert [c.id for c in got.commands] == [c.id for c in sent.commands]
    assert {k: v.tobytes() for k, v in got.columns.items()} == {
        k: v.tobytes() for k, v in sent.columns.items()
    }


def test_equal_observations_have_equal_bytes_whatever_the_order_of_their_columns() -> None:
    a, b = np.zeros(2, np.float32), np.ones(2, np.float32)
    one = codec.encode_observation(Observation(0, columns={"a": a, "b": b}))
    other = codec.encode_observation(Observation(0, columns={"b": b, "a": a}))
    assert one == other


@settings(max_examples=60, deadline=None)
@given(DECISIONS)
def test_any_decision_round_trips_and_its_memo_never_leaves(sent: Decision) -> None:
    data = codec.encode_decision(sent)
    got = codec.decode_decision(data)
    assert got.memo is None
    assert codec.encode_decision(got) == data
    assert repr(got) == repr(sent)  # repr: NaN equals itself; the memo is not part of it


@settings(max_examples=60, deadline=None)
@given(STATES)
def test_any_state_round_trips_and_keeps_its_hash(sent: State) -> None:
    data = codec.encode_state(sent)
    got = codec.decode_state(data)
    assert repr(got) == repr(sent)
    assert codec.encode_state(got) == data
    assert codec.state_hash(got) == codec.state_hash(sent)


def test_the_hash_tells_states_apart_that_differ_in_one_number() -> None:
    state = State()
    other = dataclasses.replace(state, ledger=dataclasses.replace(state.ledger, skip_run=1))
    assert len(codec.state_hash(state)) == 16
    assert codec.state_hash(state) != codec.state_hash(other)


def test_statistics_round_trip() -> None:
    assert codec.decode_stats(codec.encode_stats(Stats())) == Stats()


@pytest.mark.parametrize("name", ["default", "observe"])
def test_a_policy_round_trips_and_keeps_its_hash(name: str) -> None:
    policy = Policy.load(name)
    got = codec.decode_policy(codec.encode_policy(policy))
    assert got == policy
    assert codec.policy_hash(got) == codec.policy_hash(policy)


def test_a_whole_number_in_a_float_setting_does_not_change_the_policy_hash() -> None:
    whole = Policy.parse("[grad_norm]\nfactor = 10\n", "p")
    broken = Policy.parse("[grad_norm]\nfactor = 10.0\n", "p")
    by_hand = dataclasses.replace(whole, grad_norm=dataclasses.replace(whole.grad_norm, factor=10))
    assert codec.policy_hash(whole) == codec.policy_hash(broken) == codec.policy_hash(by_hand)


def test_a_stricter_policy_has_another_hash() -> None:
    strict = Policy.parse("[grad_norm]\nfactor = 3.0\n", "default")
    assert codec.policy_hash(strict) != codec.policy_hash(Policy.load("default"))


def test_a_policy_out_of_bounds_is_refused_with_the_setting_named() -> None:
    data = codec.encode_policy(Policy.load("default"))
    at = data.index(b"\xa3cut\xcb") + 5
    torn = data[:at] + struct.pack(">d", -1.0) + data[at + 8 :]
    with pytest.raises(ProtocolError, match=r"lr\.cut must lie between"):
        codec.decode_policy(torn)


@pytest.mark.parametrize(
    "event",
    [
        SnapshotTaken(4),
        Restored(9, 4, Stats(shape=(2, 3))),
        RestoreFailed(9, None, "no snapshot"),
        SnapshotLost(9, 4, "no memory"),
        AutomationSet(9, True, "file"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_every_event_round_trips(event: object) -> None:
    got = codec.decode_event(codec.encode_event(event))  # type: ignore[arg-type]
    assert got == event
    assert type(got) is type(event)


def test_an_outcome_round_trips() -> None:
    outcome = Outcome(3, Action.SKIP_STEP, False)
    assert codec.decode_outcome(codec.encode_outcome(outcome)) == outcome


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 400), st.integers(1, 255))
def test_garbage_and_flipped_bytes_raise_protocol_error_and_nothing_else(
    noise: bytes, at: int, flip: int
) -> None:
    data = bytearray(codec.encode_state(State()))
    data[at % len(data)] ^= flip
    readers = (
        codec.decode_state,
        codec.decode_stats,
        codec.decode_decision,
        codec.decode_observation,
        codec.decode_outcome,
        codec.decode_event,
        codec.decode_policy,
        codec.observation_from_json,
    )
    for read in readers:
        for garbage in (noise, bytes(data[:at])):
            try:
                read(garbage)
            except ProtocolError:
                pass
    try:
        codec.decode_state(bytes(data))
    except ProtocolError:
        pass


def test_a_torn_column_is_refused_by_name() -> None:
    data = codec.encode(codec.WireObservation(0, columns={"layer_grad_norm": b"12345"}))
    with pytest.raises(ProtocolError, match=r"layer_grad_norm.*float32.*5 bytes"):
        codec.decode_observation(data)


def test_numpy_scalars_are_written_as_plain_numbers() -> None:
    sent = Observation(0, loss=np.float64(1.5), grad_norm=np.float32(2.5))  # type: ignore[arg-type]
    got = codec.decode_observation(codec.encode_observation(sent))
    assert (type(got.loss), got.loss, got.grad_norm) == (float, 1.5, 2.5)


def test_json_for_people_spells_out_what_is_not_finite() -> None:
    text = codec.to_json({"a": math.nan, "b": [math.inf, -math.inf, 1.0], "c": None})
    assert json.loads(text) == {"a": "nan", "b": ["inf", "-inf", 1.0], "c": None}
    assert json.loads(codec.to_json(Outcome(3, Action.SKIP_STEP, False)))["executed"] == "skip_step"


def test_people_may_write_nan_as_a_word_and_leave_out_what_was_not_measured() -> None:
    got = codec.observation_from_json(
        b'{"step": 3, "loss": "nan", "grad_norm": 2, "columns": {"layer_grad_norm": [1, "inf"]}}'
    )
    assert math.isnan(got.loss or 0.0)
    assert (got.grad_norm, got.lr) == (2.0, None)
    assert got.columns["layer_grad_norm"].tolist() == [1.0, math.inf]


def test_another_word_for_a_number_is_refused_with_the_field_named() -> None:
    with pytest.raises(ProtocolError, match=r"observation\.loss must be a number.*'NaN'"):
        codec.observation_from_json(b'{"step": 3, "loss": "NaN"}')
