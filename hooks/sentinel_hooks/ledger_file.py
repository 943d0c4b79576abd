"""A run's ledger in the trainer: kept on disk, found again, and whose weights these are.

    keeper = Keeper(directory, run=..., incarnation=..., policy=..., found=read(directory))
    state = keeper.state()                         what the process starts with
    resumed = keeper.recognise(mark, state)        at the first safe point: the weights are there
    keeper.moved(before, state)                    after every move of the engine's state
    keeper.mark(fingerprint(target), state)        these weights can be recognised from now on

What a restart keeps, whatever weights the user loads: budgets, cooldowns, the LR cut, incidents,
obeyed orders, attempt. The step goes on counting attempted steps of the run over all its
processes: it never goes back, so that windows and cooldowns keep their meaning when the user
resumes an older checkpoint. After a kill it may repeat up to SOFT_EVERY numbers: cooldowns last
that much longer, never shorter. Statistics come back only with weights that are recognised.

Errors:  a disk that fails never hurts the run: it is told in `trouble`, and every later write
         tries again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import platform
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sentinel.core import engine
from sentinel.core.errors import ProtocolError
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION, Ledger, State, Stats
from sentinel.core.types import Decision, Observation, Outcome
from sentinel.traces import ledger as files
from sentinel.traces.ledger import Change, Life, Mark, Saved
from sentinel.wire import codec
from sentinel_hooks.snapshots.ram import live_tensors
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)

SOFT_EVERY = 32  # quiet steps between two writes that only move the step on
TAIL_BYTES = 1 << 18  # of small moves, after which the ledger is written anew
SAMPLES = 8  # values of each tensor in a fingerprint
LOCK = "ledger.lock"
LAST_STEPS = 64  # kept in memory for the record of a halt
_WRAPPERS = ("_orig_mod.", "module.")  # torch.compile, DDP: the same model


@torch.no_grad()
def fingerprint(target: Target) -> str:
    """Which model and which weights: "<names and shapes>-<values>", 8 sampled values a tensor.

    Any optimizer step moves nearly every value, so a sample tells two steps apart, for a copy of
    a few values instead of all. Raises NotReadyError while a lazy parameter has no shape.
    """
    shapes, values = blake2b(digest_size=8), blake2b(digest_size=8)
    samples: dict[Any, list[Tensor]] = {}
    for key, tensor in live_tensors(target):
        name = str(key[-1])
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        shapes.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.layout is torch.strided and local.numel() and local.device.type != "meta":
            picked = _sample(local)
            samples.setdefault((picked.device, picked.dtype), []).append(picked)
    for (_, dtype), some in sorted(samples.items(), key=lambda item: str(item[0])):
        host = torch.cat(some).cpu()
        values.update(str(dtype).encode())
        values.update(host.view(torch.uint8).numpy().data)
    return f"{shapes.hexdigest()}-{values.hexdigest()}"


def _sample(tensor: Tensor) -> Tensor:
    """Up to SAMPLES values, evenly spread, without copying the rest."""
    count = tensor.numel()
    places = (
        [(2 * k + 1) * count // (2 * SAMPLES) for k in range(SAMPLES)]
        if count > SAMPLES
        else (list(range(count)))
    )
    if tensor.is_contiguous():
        return tensor.reshape(-1)[places]
    index = torch.unravel_index(torch.tensor(places, device=tensor.device), tensor.shape)
    return tensor[index]


_claimed: set[str] = set()  # by this process


def claimed_here(directory: Path) -> bool:
    """A session of this process writes the ledger there."""
    return os.path.abspath(directory / LOCK) in _claimed


class Claim:
    """One process writes a run's ledger: the lock on run_dir/<run>/ledger.lock.

    The system lets go of it when the process ends, however it ends; a forked child never has it.
    Where there are no locks (a read-only disk, some network filesystems) all claims are granted.
    """

    def __init__(self, directory: Path) -> None:
        """Take it; see `holder`."""
        self._path = os.path.abspath(directory / LOCK)
        self._handle = -1
        self._pid = os.getpid()
        self.holder = ""  # who has it instead
        if self._path in _claimed:
            self.holder = "another session in this process"
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                said = os.read(handle, 200).decode("utf-8", "replace").strip()
                self.holder = said or "another process"
            os.close(handle)
            return
        self._handle = handle
        _claimed.add(self._path)
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {self._pid} on {platform.node()}\n".encode(), 0)

    def release(self) -> None:
        """Let go of it; a second call does nothing."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            if self._pid == os.getpid():
                _claimed.discard(self._path)
            os.close(handle)

    def __del__(self) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a restarted process goes on with.

    Attributes:
        state: the engine's.
        from_step: of the mark that the weights are; None when they are none.
        stats: of that mark, None when the statistics start cold.
        same_model: names and shapes are those of the run.
        told: one sentence for people.
    """

    state: State
    from_step: int | None
    stats: Stats | None
    same_model: bool
    told: str


class Keeper:
    """The ledger file of one run, as one process writes it; used by one thread."""

    def __init__(
        self,
        directory: Path,
        *,
        run: str,
        incarnation: str,
        policy: Policy,
        found: Saved | None = None,
        enabled: bool = True,
        claim: Claim | None = None,
    ) -> None:
        """Nothing is written yet.

        Args:
            claim: released by close().
            found: what an earlier process of this run left.
            enabled: False: never write (another rank does, or nothing is recorded).
        """
        self._directory = directory
        self._run = run
        self._incarnation = incarnation
        self._policy_hash = codec.policy_hash(policy).hex()
        self._enabled = enabled
        self._claim = claim
        self.found = found
        self.begin_with: State | None = None  # another rank than 0: what rank 0 has found
        self.paused_by_file = found.paused_by_file if found is not None else False
        self.trouble = ""
        self.told = ""  # about the lineage
        self.strange = False  # the weights are none that this run has saved
        self._marks: tuple[Mark, ...] = found.marks if found is not None else ()
        self._lives: tuple[Life, ...] = found.lives if found is not None else ()
        self._new_marks: tuple[Mark, ...] = ()  # not on disk yet
        self._written = -SOFT_EVERY  # the step of the last write
        self._base = ""  # of the ledger that this process has written last
        self._last: deque[tuple[Observation, Decision, Outcome]] = deque(maxlen=LAST_STEPS)

    # ---------------------------------------------------------------- starting

    def state(self) -> State:
        """What the process starts with: the ledger as it was left, statistics cold."""
        if self.begin_with is not None:
            return self.begin_with
        if self.found is None:
            return engine.initial()
        return State(self.found.step, Stats(), self.found.ledger)

    def recognise(self, print_: str, state: State) -> Resumed:
        """Whose weights these are. To be called once, when the user's have been loaded."""
        found = self.found
        parent = found.incarnation if found is not None else ""
        resumed = Resumed(state, None, None, True, "")
        if found is not None:
            resumed = self._compare(found, print_, state)
            self.told = resumed.told
            self.strange = resumed.from_step is None
            say = logger.info if resumed.stats is not None else logger.warning
            say(
                "resumed run=%s incarnation=%s parent=%s step=%s attempt=%s lineage=%s",
                self._run,
                self._incarnation,
                parent,
                state.step,
                state.ledger.attempt,
                resumed.told,
            )
        life = Life(self._incarnation, parent, state.step, print_, resumed.from_step)
        self._lives = (*self._lives, life)[-files.LIVES_KEPT :]
        return resumed

    def _compare(self, found: Saved, print_: str, state: State) -> Resumed:
        mark = next((m for m in reversed(found.marks) if m.fingerprint == print_ != ""), None)
        model = print_.partition("-")[0]
        known = {m.fingerprint.partition("-")[0] for m in found.marks}
        if mark is None:
            if model and known and model not in known:
                return Resumed(
                    state,
                    None,
                    None,
                    False,
                    "this is another model than the run had (names or shapes differ)",
                )
            steps = ", ".join(str(m.step) for m in found.marks) or "none"
            return Resumed(
                state,
                None,
                None,
                True,
                "these weights are none that this run has seen at the steps it remembers "
                f"({steps}): an older checkpoint, or another run's",
            )
        state = replace(state, ledger=replace(state.ledger, in_weights=mark.applied))
        where = f"the weights are those of step {mark.step}"
        newest = found.marks[-1].step
        if mark.step < newest:
            where += f", older than the newest known, of step {newest}"
        if found.engine_version != ENGINE_VERSION or found.policy_hash != self._policy_hash:
            return Resumed(
                state, mark.step, None, True, f"{where}; the policy or the engine has changed"
            )
        try:
            stats = codec.decode_stats(mark.stats)
        except ProtocolError as error:
            return Resumed(state, mark.step, None, True, f"{where}; {error}")
        return Resumed(replace(state, stats=stats), mark.step, stats, True, where)

    # ---------------------------------------------------------------- keeping

    def settled(self, observation: Observation, decision: Decision, outcome: Outcome) -> None:
        """Remember the last steps, for the record of a halt."""
        self._last.append((observation, decision, outcome))

    def moved(self, before: Ledger, state: State) -> None:
        """The engine's state has moved: write it, as urgently as it matters."""
        change = files.change_of(before, state.ledger)
        if change is Change.NONE and state.step - self._written < SOFT_EVERY:
            return
        self.save(state, sync=change is Change.HARD)

    def mark(self, print_: str, state: State) -> None:
        """These weights and these statistics belong together, before `state.step`."""
        new = Mark(
            state.step,
            print_,
            codec.encode_stats(state.stats),
            state.ledger.in_weights,
            self._incarnation,
        )
        marks = [m for m in self._marks if m.fingerprint != print_ and m.step != state.step]
        pinned = {s.step for s in state.ledger.snapshots}
        spare = [m for m in marks if m.step not in pinned]
        for extra in (spare + [m for m in marks if m.step in pinned])[
            : max(len(marks) + 1 - files.MARKS_KEPT, 0)
        ]:
            marks.remove(extra)
        self._marks = (*marks, new)
        self._new_marks = (*self._new_marks, new)

    def save(self, state: State, *, sync: bool) -> bool:
        """Write now; False when that failed."""
        self._written = state.step
        if not self._enabled:
            return True
        saved = Saved(
            self._run,
            self._incarnation,
            state.step,
            state.ledger,
            self._policy_hash,
            ENGINE_VERSION,
            self.paused_by_file,
            self._marks,
            self._lives,
        )
        try:
            sync = sync or not self._append(saved)
            if sync:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._base = files.write(self._directory, saved)
                self._new_marks = ()
        except OSError as error:
            if not self.trouble:
                logger.warning(
                    "the ledger cannot be written run=%s step=%s reason=%s",
                    self._run,
                    state.step,
                    error,
                )
            self.trouble = str(error)
            self._base = ""  # the next one is written in full
            return False
        if self.trouble:
            self.trouble = ""
            logger.info("the ledger is written again run=%s step=%s", self._run, state.step)
        return True

    def close(self) -> None:
        """Another process may go on with the run."""
        if self._claim is not None:
            self._claim.release()

    def _append(self, saved: Saved) -> bool:
        """A line more in the tail; False when the ledger is to be written in full."""
        if not self._base:
            return False
        try:
            size = files.append(self._directory, saved, self._base, self._new_marks)
        except OSError:
            return False  # the directory has vanished, perhaps: it is made again
        self._new_marks = ()
        return size <= TAIL_BYTES

    # ---------------------------------------------------------------- halting

    def halt(self, state: State, reason: str, **values: Any) -> None:
        """Ledger, marker and what is known of the last steps; durable when it returns.

        Raises:
            OSError: the record is incomplete.
        """
        self.save(state, sync=True)
        if not self._enabled:
            return
        files.write_halted(
            self._directory,
            run=self._run,
            incarnation=self._incarnation,
            step=max(state.step - 1, 0),
            reason=reason,
            way_out=f"when the cause is gone: sentinel resume {self._directory}, or delete this "
            "file; until then attach() refuses this run id",
            **values,
            last_steps=list(_rows(self._last)),
        )


def _rows(last: Iterable[tuple[Observation, Decision, Outcome]]) -> Iterable[dict[str, Any]]:
    for observation, decision, outcome in last:
        yield {
            "step": observation.step,
            "loss": _number(observation.loss),
            "grad_norm": _number(observation.grad_norm),
            "lr": _number(observation.lr),
            "lr_factor": decision.lr_factor,
            "batch_id": observation.batch_id,
            "executed": outcome.executed.name.lower(),
            "applied": outcome.applied,
            "rule": decision.rule,
            "reason": decision.reason,
        }


def _number(value: float | None) -> float | str | None:
    """JSON for people: "nan", "inf", "-inf"."""
    if value is None or value - value == 0:
        return value
    return str(float(value))
