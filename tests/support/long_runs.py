"""A long recorded run without the hours: its files are put together from one step's record.

    write_run(directory, steps=1_000_000)

The bytes are what a Recorder with the same observations would have written, except that the
decisions are all the first step's and nothing moves the engine's state.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from sentinel.core import engine
from sentinel.core.policy import Policy
from sentinel.core.types import Observation, Outcome
from sentinel.traces.records import FORMAT, INDEX_DTYPE, Header, encode_header, encode_step
from sentinel.traces.segments import (
    FRAME,
    MAGIC,
    SCALARS,
    SEGMENT_BYTES,
    Kind,
    encode_frame,
    segment_name,
)
from sentinel.traces.summary import footer
from sentinel.wire import codec


def write_run(
    directory: Path, steps: int, *, segment_bytes: int = SEGMENT_BYTES, close_last: bool = True
) -> None:
    """One incarnation of `steps` steps.

    Args:
        close_last: else the last segment ends as that of a run that is still going does.
    """
    policy, state = Policy(), engine.initial()
    seen = Observation(0, loss=3.0, grad_norm=1.0, lr=1e-3, shape=(2, 128), batch_id="b")
    decided = engine.decide(state, seen, policy)
    outcome = Outcome(0, decided.action, applied=True)
    step = encode_step(seen, decided, outcome, 0, 1e-4, has_columns=False)
    place = directory / "0000-long"
    place.mkdir(parents=True)
    chunk = segment_bytes // (FRAME.size + len(step)) + 1
    rng = np.random.default_rng(0)
    for number, first in enumerate(range(0, steps, chunk)):
        count = min(chunk, steps - first)
        rows = np.tile(np.frombuffer(step, np.uint8), (count, 1))
        index = rows[:, : INDEX_DTYPE.itemsize].copy().view(INDEX_DTYPE)[:, 0]
        at = np.arange(first, first + count)
        index["step"], index["attempt"] = at, at // 100_000
        index["loss"] = 3.0 * (at + 1.0) ** -0.05 + rng.normal(0, 0.02, count)
        index["grad_norm"] = rng.lognormal(0, 0.3, count)
        index["lr"] = 1e-3 * np.cos(at / steps)
        index["loss"][at % 9973 == 5] = np.nan
        index["present"][at % 7919 == 3] &= ~np.uint8(1)
        packed = index.tobytes()
        rows[:, : INDEX_DTYPE.itemsize] = np.frombuffer(packed, np.uint8).reshape(count, -1)
        payloads = rows.tobytes()
        header = Header(
            format=FORMAT,
            stream=SCALARS,
            number=number,
            run="long",
            incarnation="long",
            engine_version=1,
            policy=codec.encode_policy(policy),
            state=codec.encode_state(state),
        )
        size = len(step)
        parts = [MAGIC, encode_frame(Kind.HEADER, encode_header(header))]
        for i in range(0, count * size, size):
            payload = payloads[i : i + size]
            parts += (FRAME.pack(Kind.STEP, size, zlib.crc32(payload, Kind.STEP)), payload)
        data = b"".join(parts)
        if close_last or first + count < steps:
            data += b"".join(encode_frame(*record) for record in footer(packed, len(data)))
        (place / segment_name(SCALARS, number)).write_bytes(data)
