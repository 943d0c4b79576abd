"""What a run's writer says: its steps, its state when it is asked for it, and its end.

    reply = reports.steps(message, now)        the frames recorded, the newest decided if it can be
    reports.hand_over(message, now)            the state that the reply has asked for
    reports.close(message, now)

A frame is decided on the copy of the trainer's state (mirror.py), where that fits; else the reply
asks for the state. Only recorded is what comes late, what another engine version or policy wrote,
and what was overtaken. The same frame again gets the same answer and is recorded once. The writer
is told people's orders with every reply.

Units:   `now` in Unix seconds; `timer` gives monotonic seconds, for durations only.
Errors:  RefusedError for anybody but the present writer, ProtocolError for what cannot be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from sentinel.core.catalog import PROTECTIONS
from sentinel.core.errors import ProtocolError, StateError
from sentinel.sidecar.runs.bounds import check_counts, check_frame
from sentinel.sidecar.runs.chronicle import Chronicle
from sentinel.sidecar.runs.recording import Recording
from sentinel.sidecar.runs.registry import Registry
from sentinel.sidecar.runs.run import ENDED, Run
from sentinel.wire import codec, messages
from sentinel.wire.messages import Close, Frame, HandOver, Reply, Steps

logger = logging.getLogger(__name__)

MOST_REFUSED = 16  # reasons in one answer; the first says what the others are like
MOST_WHY = 500  # letters of a sentence that people are shown


class Reports:
    """See the module docstring."""

    def __init__(
        self,
        registry: Registry,
        recording: Recording,
        chronicle: Chronicle,
        timer: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._recording = recording
        self._chronicle = chronicle
        self._timer = timer

    def steps(self, message: Steps, now: float) -> Reply:
        """Record the frames and decide the newest, if it can be decided.

        Raises:
            RefusedError: unknown run, or another process writes it.
            ProtocolError: a frame cannot be read.
        """
        run = self._registry.writer(message.run, message.incarnation, message.fence)
        if message.counts is not None:
            check_counts(message.counts)
        frames, refused = _sound(run, message)
        run.heard(now, report=bool(frames))
        self._chronicle.back(run)
        if message.counts is not None:
            run.figures.counts = message.counts
        known = message.protection in PROTECTIONS  # a newer trainer may have others
        run.said, run.said_why = (message.protection, message.why[:MOST_WHY]) if known else ("", "")
        if not frames:
            commands, left_s = run.orders.to_tell(now)
            return Reply(
                run=run.name,
                incarnation=run.incarnation,
                seq=-1,
                step=-1,
                commands=commands,
                expires_in_s=left_s,
                refused=refused,
            )
        reply, kept = None, True
        for frame in frames:
            if message.late:
                self._recording.late(run, frame, now)
                reply = _answer(run, frame, now, recorded_only="late")
            else:
                reply = self._live(run, frame, message, now)
                if reply.need_state:
                    break
                kept = kept and reply.recorded
        assert reply is not None
        if not kept or refused:
            reply = msgspec.structs.replace(reply, recorded=kept, refused=refused)
        return reply

    def hand_over(self, message: HandOver, now: float) -> None:
        """Take the trainer's state; raises RefusedError or ProtocolError."""
        run = self._registry.writer(message.run, message.incarnation, message.fence)
        run.last_heard = now
        mirror = run.mirror
        if not run.decides or (mirror.known and message.seq < mirror.next_seq):
            return  # overtaken: the copy is beyond it
        state = codec.decode_state(message.state)
        mirror.take(state, message.seq)
        run.figures.handovers += 1
        run.orders.known(state.ledger.commands)
        self._chronicle.incidents(run, now)
        logger.info("state handed over run=%s step=%s", run.name, state.step)

    def close(self, message: Close, now: float) -> None:
        """The run is over; raises RefusedError."""
        run = self._registry.writer(message.run, message.incarnation, message.fence)
        run.last_heard = now
        figures, mirror = run.figures, run.mirror
        if message.counts is not None:
            figures.counts = message.counts
        if run.run_state in ENDED:
            return  # our answer was lost on the way
        figures.carried_out(message.moves, decides=run.decides, decision=mirror.decision)
        self._recording.outcomes(run, message.moves, now)
        self._recording.after(run, message.moves)
        if mirror.known and not mirror.handed:
            try:
                mirror.follow(message.moves, run.policy)
            except StateError as error:
                _cannot_follow(run, error)
        self._chronicle.incidents(run, now)
        self._chronicle.ends(run, "halted" if message.state == "halted" else "finished", now)
        self._recording.close(run)

    def _live(self, run: Run, frame: Frame, message: Steps, now: float) -> Reply:
        mirror, kept = run.mirror, run.kept
        last = kept.reply
        if last is not None and last.seq == frame.seq and frame.seq == mirror.next_seq - 1:
            # The same question again: our answer was lost on the way, or no disk took the report.
            if frame.seq not in kept.seen:
                on_disk = self._recording.again(run, frame, last.decision or b"", now)
                last = kept.reply = msgspec.structs.replace(last, recorded=on_disk)
            commands, left_s = run.orders.to_tell(now)
            return msgspec.structs.replace(last, commands=commands, expires_in_s=left_s)
        if frame.seq in kept.seen:
            return _answer(run, frame, now, recorded_only="this frame was recorded before")
        if frame.seq < mirror.next_seq:
            # Overtaken on the way by a later frame: its step is over.
            self._recording.late(run, frame, now)
            return _answer(run, frame, now, recorded_only="late")
        observation = codec.core_observation(frame.observation)
        reason = run.reason
        if not reason and message.engine_version != run.engine_version:
            reason = f"engine version {message.engine_version} is not the registered one"
        if not reason and message.policy_hash != run.policy_hash:
            reason = "the trainer runs another policy than it registered: register again"
        if reason:
            on_disk = self._recording.live(run, frame, observation, None, now, frame.attempt)
            return _answer(run, frame, now, recorded_only=reason, recorded=on_disk)
        if not _caught_up(run, frame):
            mirror.known = False
            return _answer(run, frame, now, need_state=True)
        state, handed, before = mirror.state, mirror.handed, mirror.before
        assert state is not None
        attempt = state.ledger.attempt
        started = self._timer()
        try:
            decision = mirror.decide(frame.seq, observation, run.policy)
        except Exception:  # whatever it is, the trainer's own engine has decided already
            logger.exception("cannot decide run=%s step=%s", run.name, observation.step)
            run.figures.failed("decide")
            mirror.known = False
            on_disk = self._recording.live(run, frame, observation, None, now, attempt)
            return _answer(
                run, frame, now, recorded_only="the sidecar failed to decide", recorded=on_disk
            )
        run.figures.duration.add(self._timer() - started)
        data = codec.encode_decision(decision)
        on_disk = self._recording.live(
            run,
            frame,
            observation,
            decision,
            now,
            attempt,
            data,
            state if handed else before,
            handed=handed,
        )
        kept.reply = _answer(run, frame, now, decision=data, recorded=on_disk)
        return kept.reply


def _sound(run: Run, message: Steps) -> tuple[list[Frame], tuple[str, ...]]:
    """The frames that can be taken, and what is wrong with each of the others.

    One that comes alone to be decided is refused as a whole: its trainer is there to hear it.
    Among others, late, or for the second time, it is answered like one that was taken: else its
    trainer would bring it, and what comes behind it, again and again. The answer says what is
    wrong with it.

    Raises:
        ProtocolError: the only frame of a live message cannot be taken.
    """
    frames: list[Frame] = []
    refused: list[str] = []
    count = len(message.frames)
    for at, raw in enumerate(message.frames):
        try:
            frame = messages.decode_frame(raw)
            check_frame(run, frame)
        except ProtocolError as error:
            if not run.figures.rejected:
                logger.warning("reports refused run=%s why=%s", run.name, str(error)[:500])
            first = run.figures.refused(bytes(raw))
            if count == 1 and not message.late and first:
                raise
            refused.append(f"frame {at + 1} of {count}: {error}")
        else:
            frames.append(frame)
    return frames, tuple(refused[:MOST_REFUSED])


def _caught_up(run: Run, frame: Frame) -> bool:
    """Whether the copy is what this frame is to be decided on."""
    try:
        return run.mirror.caught_up(frame, run.policy)
    except StateError as error:
        _cannot_follow(run, error)
        return False


def _cannot_follow(run: Run, error: StateError) -> None:
    logger.warning("cannot follow the trainer's state run=%s error=%s", run.name, error)


def _answer(
    run: Run,
    frame: Frame,
    now: float,
    *,
    decision: bytes | None = None,
    need_state: bool = False,
    recorded_only: str = "",
    recorded: bool = True,
) -> Reply:
    commands, left_s = run.orders.to_tell(now)
    return Reply(
        run=run.name,
        incarnation=run.incarnation,
        seq=frame.seq,
        step=frame.observation.step,
        decision=decision,
        need_state=need_state,
        recorded_only=recorded_only,
        recorded=recorded,
        commands=commands,
        expires_in_s=left_s,
    )
