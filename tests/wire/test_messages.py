"""Messages: versions, unknown fields, frames that wait, and seals."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.core.errors import ProtocolError
from sentinel.core.events import SnapshotTaken
from sentinel.core.state import State
from sentinel.core.types import Action, Command, CommandKind, Observation, Outcome, Source
from sentinel.wire import codec, messages
from sentinel.wire.messages import Accepted, Frame, Register, Reply, Steps


def frame(seq: int = 0) -> Frame:
    return Frame(
        seq=seq,
        observation=codec.wire_observation(Observation(seq, loss=1.0)),
        moves=(
            messages.wire_outcome(Outcome(seq - 1, Action.SKIP_STEP, False, Source.SIDECAR)),
            codec.wire_event(SnapshotTaken(seq)),
        ),
        state_hash=codec.state_hash(State()),
    )


def test_a_frame_encoded_early_travels_inside_a_later_message() -> None:
    raw = [messages.encode_frame(frame(seq)) for seq in range(3)]
    sent = Steps(
        run="r",
        incarnation="i",
        fence=1,
        policy_hash=b"p",
        late=True,
        frames=tuple(msgspec.Raw(x) for x in raw),
    )
    got = messages.decode_message(Steps, messages.encode_message(sent))
    assert [messages.decode_frame(x) for x in got.frames] == [frame(seq) for seq in range(3)]


def test_a_reply_carries_orders() -> None:
    order = Command("c1", CommandKind.SCALE_LR, 0.5)
    sent = Reply(run="r", incarnation="i", seq=1, step=1, commands=(order,))
    assert messages.decode_message(Reply, messages.encode_message(sent)).commands == (order,)


def test_another_version_is_refused_with_both_versions_in_the_message() -> None:
    data = codec.encode({"v": 2, "run": "r"})
    with pytest.raises(ProtocolError, match=r"protocol version 2, this side version 1"):
        messages.decode_message(Accepted, data)


def test_another_version_is_named_even_when_its_fields_have_changed() -> None:
    data = codec.encode({"v": 3, "who": "r", "policy": 7})
    with pytest.raises(ProtocolError, match="protocol version 3"):
        messages.decode_message(Register, data)


def test_fields_of_a_later_release_are_ignored() -> None:
    data = codec.encode({"v": 1, "run": "r", "mood": "good"})
    assert messages.decode_message(Accepted, data) == Accepted(run="r")


def test_a_message_without_a_run_is_refused_by_field() -> None:
    with pytest.raises(ProtocolError, match=r"Accepted cannot be read.*run"):
        messages.decode_message(Accepted, codec.encode({"v": 1}))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 400), st.integers(1, 255))
def test_garbage_raises_protocol_error_and_nothing_else(noise: bytes, at: int, flip: int) -> None:
    torn = bytearray(messages.encode_frame(frame()))
    torn[at % len(torn)] ^= flip
    for data in (noise, bytes(torn)):
        for read in (messages.decode_frame, lambda d: messages.decode_message(Reply, d)):
            try:
                read(data)
            except ProtocolError:
                pass


class TestSeal:
    def test_it_fits_the_message_that_it_was_made_for(self) -> None:
        seal = messages.seal("secret", "/p", b"body")
        assert messages.sealed("secret", "/p", b"body", seal)

    @pytest.mark.parametrize(
        ("token", "path", "body", "question"),
        [
            ("secret", "/p", b"bodY", "q"),
            ("secret", "/q", b"body", "q"),
            ("other", "/p", b"body", "q"),
            ("", "/p", b"body", "q"),
            ("secret", "/p", b"body", "another question"),
        ],
    )
    def test_it_fits_no_other_body_path_token_or_question(
        self, token: str, path: str, body: bytes, question: str
    ) -> None:
        seal = messages.seal("secret", "/p", b"body", "q")
        assert not messages.sealed(token, path, body, seal, question)

    def test_a_seal_that_is_no_ascii_does_not_fit(self) -> None:
        assert not messages.sealed("secret", "/p", b"body", "é")
