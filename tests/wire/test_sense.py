"""What nobody can have measured is refused with its field; what a broken trainer saw is truth."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from sentinel.core.errors import ProtocolError
from sentinel.core.types import Observation
from sentinel.wire import codec, messages, sense
from sentinel.wire.codec import WireObservation

OF_ANY_SIGN = ("layer_attention_max_logit", "layer_activation_spread", "something_else")


def bytes_of(*values: float) -> bytes:
    return codec.column_bytes(np.array(values, np.float32))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"grad_norm": -1.0}, r"observation\.grad_norm must be 0 or more, NaN or inf, got -1"),
        ({"grad_norm": -math.inf}, r"grad_norm must be 0 or more, NaN or inf, got -inf"),
        ({"lr": -1e-9}, r"observation\.lr must be 0 or more"),
        ({"loss_scale": -2.0}, r"observation\.loss_scale must be 0 or more"),
        ({"shape": (4, -1)}, r"observation\.shape\[1\] must be a size from 0 on.*got -1"),
        ({"shape": (2**63,)}, r"observation\.shape\[0\] must be a size"),
        ({"shape": (1,) * 17}, r"shape may have 16 sizes, got 17"),
        ({"batch_id": "x" * 1025}, r"batch_id must have at most 1024 characters, got 1025"),
        ({"scalars": {"memory_bytes/weights": -1.0}}, r"scalars\['memory_bytes/weights'\] must be"),
        ({"scalars": {"x" * 129: 1.0}}, r"at most 128 characters"),
        ({"scalars": {str(n): 1.0 for n in range(1025)}}, r"may be 1024 numbers, got 1025"),
    ],
)
def test_nonsense_names_its_field_its_bound_and_its_value(more: dict[str, Any], said: str) -> None:
    for kind in (WireObservation, Observation):
        with pytest.raises(ProtocolError, match=said):
            sense.check_numbers(kind(3, **more))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-320, 1e308, math.inf, math.nan, None])
def test_zero_nan_and_inf_are_truth(value: float | None) -> None:
    sense.check_numbers(WireObservation(3, value, value, value, value))


def test_a_loss_may_be_of_any_sign_and_so_may_a_number_without_a_bound() -> None:
    sense.check_numbers(WireObservation(3, -5.0, scalars={"loss_variance": -1.0}))
    sense.check_numbers(WireObservation(3, -math.inf))


@pytest.mark.parametrize("name", sorted(sense.NORMS))
def test_the_row_of_a_norm_below_zero_is_named(name: str) -> None:
    said = rf"observation\.columns\.{name}\[2\] must be 0 or more, NaN or inf, got -0\.5"
    columns = {"layer_attention_max_logit": bytes_of(-1, -2), name: bytes_of(1, -np.inf, -0.5, -9)}
    with pytest.raises(ProtocolError, match=said):
        sense.check_column_bytes(columns)
    with pytest.raises(ProtocolError, match=said):
        sense.check_columns({name: np.array([1, np.nan, -0.5], np.float32)})


@pytest.mark.parametrize("name", [*sorted(sense.NORMS), *OF_ANY_SIGN])
def test_a_row_may_be_unmeasured_nan_or_inf(name: str) -> None:
    values = [0.0, -0.0, math.nan, math.inf, -math.inf]  # the last: not measured
    values += [-3.0] if name in OF_ANY_SIGN else []
    sense.check_column_bytes({name: bytes_of(*values)})
    sense.check_columns({name: np.array(values, np.float32)})


def test_too_many_columns_are_refused() -> None:
    with pytest.raises(ProtocolError, match="may be 64 columns, got 65"):
        sense.check_column_bytes({f"c{n}": b"" for n in range(65)})


# ---- a person's JSON -----------------------------------------------------------------------


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    grad_norm: float | None = None


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner | None = None
    all_of_them: tuple[Inner | str, ...] = ()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"iner": null}', r"it cannot be read: there is no field 'iner'; did you mean 'inner'\?"),
        (b'{"quux": 1}', r"there is no field 'quux'; there are: inner, all_of_them"),
        (b'{"inner": {"step": 1, "gradnorm": 2}}', r"'gradnorm' in inner; did you mean 'grad_n"),
        (b'{"all_of_them": ["a", {"step": 1, "x": 2}]}', r"'x' in all_of_them\[1\]; there are: st"),
        (b'{"inner": {"step": NaN}}', r'NaN and Infinity are no JSON: write "nan", "inf" or'),
        (b'{"inner": {"step": [1, -Infinity]}}', r'write "nan", "inf" or "-inf", in quotes'),
        (b'{"inner": {}}', r"missing required field `step` - at `\$\.inner`"),
        (b"", r"it cannot be read: there is no body"),
        (b"{", r"truncated"),
        (b'{"a`b": 1}', r"there is no field 'a`b'"),
        (b"\xff", r"malformed"),
        (b'{"inner":' * 5000, r"cannot be read"),
    ],
)
def test_json_that_does_not_fit_says_what_there_is(body: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        sense.decode_json(body, Outer, "it")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"step": 3, "gradnorm": 1}', r"no field 'gradnorm'; did you mean 'grad_norm'"),
        (b'{"step": 3, "grad_norm": -1}', r"observation\.grad_norm must be 0 or more"),
        (b'{"step": 3, "grad_norm": "-inf"}', r"observation\.grad_norm must be 0 or more"),
        (
            b'{"step": 3, "columns": {"layer_grad_norm": [1, -1]}}',
            r"observation\.columns\.layer_grad_norm\[1\] must be 0 or more, NaN or inf, got -1",
        ),
        (
            b'{"step": 3, "columns": {"layer_grad_norm": [1, "x"]}}',
            r"observation\.columns\.layer_grad_norm\[1\] must be a number.*got 'x'",
        ),
        (b'{"step": 3, "shape": [-1]}', r"observation\.shape\[0\]"),
    ],
)
def test_an_observation_of_a_person_is_read_strictly(body: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        codec.observation_from_json(body)


def test_a_row_that_was_not_measured_may_be_null() -> None:
    got = codec.observation_from_json(
        b'{"step": 3, "columns": {"layer_grad_norm": [1, null, "nan", "-inf"]}}'
    )
    assert got.columns["layer_grad_norm"].tolist()[:2] == [1.0, -math.inf]
    assert got.columns["layer_grad_norm"].tolist()[3] == -math.inf


def test_a_frame_of_a_later_version_may_hold_more() -> None:
    plain = msgspec.msgpack.decode(
        messages.encode_frame(messages.Frame(seq=1, observation=WireObservation(3, 2.0)))
    )
    plain["something_new"] = 1
    plain["observation"]["something_new"] = {"a": [1]}
    frame = messages.decode_frame(msgspec.msgpack.encode(plain))
    assert (frame.seq, frame.observation.loss) == (1, 2.0)


def test_an_answer_of_a_later_version_can_be_read_by_an_earlier_trainer() -> None:
    class EarlierReply(messages.Message, kw_only=True, frozen=True):
        incarnation: str
        seq: int
        step: int
        recorded: bool = True

    said = {"run": "r", "incarnation": "i", "seq": 1, "step": 2}
    new = messages.encode_message(messages.Reply(**said, refused=("frame 1 of 2: no",)))
    old = msgspec.msgpack.decode(new, type=EarlierReply)
    assert (old.seq, old.recorded) == (1, True)
    same = messages.encode_message(messages.Reply(**said))
    assert b"refused" not in same


@pytest.mark.parametrize(
    ("kind", "message", "field", "most"),
    [
        (messages.Steps, {"fence": 1, "policy_hash": b""}, "frames", messages.MOST_FRAMES),
        (messages.Register, {"policy": b""}, "layers", messages.MOST_LAYERS),
    ],
)
def test_a_message_of_nothing_but_elements_is_refused_before_they_are_made(
    kind: Any, message: dict[str, Any], field: str, most: int
) -> None:
    head = msgspec.msgpack.encode({"v": 1, "run": "r", "incarnation": "i"} | message)
    size = 2_000_000
    data = bytes([head[0] + 1]) + head[1:] + msgspec.msgpack.encode(field)
    data += b"\xdd" + size.to_bytes(4, "big") + b"\xc0" * size
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=rf"length <= {most} - at `\$\.{field}`"):
            messages.decode_message(kind, data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_frame_of_nothing_but_moves_is_refused() -> None:
    move = messages.WireOutcome(1, 0, True)  # type: ignore[arg-type]
    frame = messages.Frame(
        seq=1, observation=WireObservation(3), moves=(move,) * (messages.MOST_MOVES + 1)
    )
    with pytest.raises(ProtocolError, match=r"length <= 1024 - at `\$\.moves`"):
        messages.decode_frame(messages.encode_frame(frame))
