"""The messages between a trainer and a sidecar, protocol version 1.

    encode_message(message) -> bytes      decode_message(Kind, bytes) -> message

A conversation: Register -> Registered, then for every step Steps(one frame) -> Reply. A Reply with
`need_state` is answered with HandOver; frames that were missed follow later as Steps(late=True).
Close ends it. Unknown fields are ignored; another version is refused, with both in the message.

Integrity: requests and replies carry a seal, blake2b-128 keyed with the token (if there is one)
over the path and the body; a reply's seal covers the seal of its request too. So a garbled message,
a stale answer and an answer from somebody without the token all look alike: not from the sidecar.

Purity:  no clock, no I/O.
Errors:  decode_message raises ProtocolError.
"""

from __future__ import annotations

import hmac
import re
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

import msgspec

from sentinel.core.errors import ProtocolError
from sentinel.core.state import ENGINE_VERSION
from sentinel.core.types import Action, Command, Outcome
from sentinel.wire import codec
from sentinel.wire.codec import HASH_BYTES, WireDecision, WireEvent, WireObservation

PROTOCOL_VERSION = 1
SEAL_HEADER = "sentinel-seal"
CONTENT_TYPE = "application/msgpack"

# Checked from the header of each array, before anything is made of it: a small message must not
# become gigabytes of objects.
MOST_FRAMES = 1024
MOST_LAYERS = 100_000
MOST_MOVES = 1024

# Run ids that a sidecar takes: they stand in URLs, labels and file names.
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")

M = TypeVar("M", bound="Message")


class Message(msgspec.Struct, kw_only=True, frozen=True):
    """What every message carries.

    Attributes:
        v: protocol version of the sender.
        run: the run it is about.
    """

    v: int = PROTOCOL_VERSION
    run: str


class Layer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row of the layer table; its place is its index in every column.

    Attributes:
        name: fully qualified name of the module.
        kind: class name of the module.
        block: index of the repeated block it belongs to, None outside of blocks.
        attention: it has attention logits.
    """

    name: str
    kind: str = ""
    shape: tuple[int, ...] = ()
    block: int | None = None
    attention: bool = False


class Register(Message, kw_only=True, frozen=True):
    """A trainer process introduces itself.

    Attributes:
        incarnation: unique to this process's attach.
        fence: the fence of an earlier registration of this incarnation, 0 for none.
        policy: canonical bytes of the policy it runs.
        pinned: it keeps that policy; otherwise the sidecar may hand it another.
        first: number of the oldest frame that this registration may still bring.
        info: host, pid, versions: for people.
    """

    incarnation: str
    fence: int = 0
    engine_version: int = ENGINE_VERSION
    policy: bytes
    pinned: bool = True
    first: int = 0
    layers: Annotated[tuple[Layer, ...], msgspec.Meta(max_length=MOST_LAYERS)] = ()
    info: dict[str, str] = {}


class Registered(Message, kw_only=True, frozen=True):
    """The sidecar's answer to Register.

    Attributes:
        fence: goes into every later message of this incarnation; the highest one writes.
        policy: canonical bytes of the policy to run; equal to the one sent, or the handed one.
        decides: False: it only records, `reason` says why.
    """

    fence: int
    policy: bytes
    engine_version: int = ENGINE_VERSION
    decides: bool = True
    reason: str = ""


class WireOutcome(msgspec.Struct, tag="outcome", frozen=True):
    """An Outcome among the moves."""

    step: int
    executed: Action
    applied: bool
    source: str = "trainer"


Move = WireOutcome | WireEvent


class Frame(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One step.

    Attributes:
        seq: counts the frames of one incarnation from 0, without a gap.
        attempt: the ledger's attempt: raised by every restore.
        moves: what moved the state since the frame before: outcome and events, in order.
        state_hash: of the state that this observation is to be decided on, after those moves.
        own: what the trainer's own engine decided, for a sidecar that may only record.
    """

    seq: int
    attempt: int = 0
    observation: WireObservation
    moves: Annotated[tuple[Move, ...], msgspec.Meta(max_length=MOST_MOVES)] = ()
    state_hash: bytes = b""
    own: WireDecision | None = None


class Counts(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The trainer's own counters, cumulative since attach.

    Attributes:
        gauges: what else it measures now, by metric name: tokens_per_second, clipped_step_ratio,
            and "memory_bytes/KIND".
    """

    misses: dict[str, int] = {}
    internal_errors: dict[str, int] = {}
    mismatches: int = 0
    dropped: int = 0
    longest_wait_s: float = 0.0
    gauges: dict[str, float] = {}


class Steps(Message, kw_only=True, frozen=True):
    """One frame to be decided, or several late ones to be recorded, or none: a sign of life.

    Attributes:
        frames: each an encoded Frame.
        late: the frames were carried out already: record them, decide nothing.
        counts: the trainer's own counters, when they moved.
        protection: with a sign of life, how the run is guarded now, where that is no longer what
            its newest decision says: no watched optimizer steps any more. "": as decided.
        why: one sentence to it, for people.
    """

    incarnation: str
    fence: int
    engine_version: int = ENGINE_VERSION
    policy_hash: bytes
    late: bool = False
    counts: Counts | None = None
    protection: str = ""
    why: str = ""
    frames: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MOST_FRAMES)]


class Reply(Message, kw_only=True, frozen=True, omit_defaults=True):
    """The sidecar's answer to Steps; about their last frame.

    Attributes:
        seq: of that frame, -1 when there was none.
        decision: canonical bytes of the decision; None when it does not decide.
        need_state: it cannot follow: hand the state over and ask again.
        recorded_only: why it does not decide; "" when it does.
        recorded: False: there is a frame that no disk took; keep them, and deliver them later.
        commands: people's orders not yet acknowledged, oldest first.
        expires_in_s: how long each of them may still be obeyed, by the sidecar's clock.
        refused: frames among several, or late ones, that make no sense, and why: they are not
            recorded and need not come again. The other frames of the message were taken.
    """

    incarnation: str
    seq: int
    step: int
    decision: bytes | None = None
    need_state: bool = False
    recorded_only: str = ""
    recorded: bool = True
    commands: tuple[Command, ...] = ()
    expires_in_s: tuple[float, ...] = ()
    refused: tuple[str, ...] = ()


class HandOver(Message, kw_only=True, frozen=True):
    """The trainer's state before it decides frame `seq`."""

    incarnation: str
    fence: int
    seq: int
    state: bytes


class Close(Message, kw_only=True, frozen=True):
    """The run is over, or sentinel was detached from it.

    Attributes:
        state: finished or halted.
        moves: what moved the state since the last frame.
    """

    incarnation: str
    fence: int
    state: str = "finished"
    moves: tuple[Move, ...] = ()
    counts: Counts | None = None


class Accepted(Message, kw_only=True, frozen=True):
    """HandOver and Close were taken."""


class Refused(Message, kw_only=True, frozen=True):
    """An error that the trainer can act on.

    Attributes:
        code: unknown_run, fenced, version, garbled, unauthorized or malformed.
        detail: for people.
    """

    code: str
    detail: str = ""


_KINDS: tuple[type[Message], ...] = (
    Register,
    Registered,
    Steps,
    Reply,
    HandOver,
    Close,
    Accepted,
    Refused,
)
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in _KINDS
}
_frame = msgspec.msgpack.Decoder(Frame)


class _Version(msgspec.Struct):
    v: int


_version = msgspec.msgpack.Decoder(_Version)


def encode_message(message: Message) -> bytes:
    """A message as msgpack."""
    data: bytes = codec.encode(message)
    return data


def decode_message(kind: type[M], data: bytes) -> M:
    """`data` as a message of that kind.

    Raises:
        ProtocolError: it is not one, or of another protocol version.
    """
    what = kind.__name__
    try:
        message: M = codec.decode_with(_decoders[kind], data, what)
    except ProtocolError:
        # A newer version may have changed the fields: say that, and not which field it was.
        check_version(codec.decode_with(_version, data, what).v, what)
        raise
    check_version(message.v, what)
    return message


def check_version(theirs: int, what: str) -> None:
    """Raise ProtocolError unless the other side speaks our version."""
    if theirs != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{what} speaks protocol version {theirs}, this side version {PROTOCOL_VERSION}; "
            "install the same torch-sentinel on both sides"
        )


def encode_frame(frame: Frame) -> bytes:
    """A frame as msgpack, ready to be sent now or kept for later."""
    data: bytes = codec.encode(frame)
    return data


def decode_frame(data: bytes | msgspec.Raw) -> Frame:
    """Inverse of encode_frame; raises ProtocolError."""
    return codec.decode_with(_frame, bytes(data), "frame")


def wire_outcome(outcome: Outcome) -> WireOutcome:
    """An outcome as a move."""
    return WireOutcome(outcome.step, outcome.executed, outcome.applied, str(outcome.source))


def seal(token: str, path: str, body: bytes, request: str = "") -> str:
    """The seal of a message; `request` is the seal of the request that a reply answers."""
    key = blake2b(token.encode()).digest() if token else b""
    mac = blake2b(body, digest_size=HASH_BYTES, key=key)
    mac.update(b"\0" + path.encode() + b"\0" + request.encode())
    return mac.hexdigest()


def sealed(token: str, path: str, body: bytes, given: str, request: str = "") -> bool:
    """Whether `given` is the seal of that message, compared in constant time."""
    return hmac.compare_digest(seal(token, path, body, request).encode(), given.encode())
