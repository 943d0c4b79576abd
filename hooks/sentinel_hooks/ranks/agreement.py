"""What the ranks tell each other, and what all of them conclude from it.

    agreement = Agreement(group, layers)
    heard = agreement.say(Says(Kind.STEP, ...))      one all-reduce; the same Heard on every rank

Everything goes through one vector of one shape with SUM, whatever it is about: so that ranks which
got out of step notice it by the numbers instead of pairing one thing with another in silence.
Whole numbers are carried modulo 4096 with their squares: equal everywhere exactly when
n * sum(x^2) == sum(x)^2. Bytes of rank 0 (its note) travel as whole numbers of 48 bits, to which
the others add nothing.

Per-layer parts that add up are added; a maximum cannot be had from a sum, so SPEAKERS ranks a step
have a place each for theirs, in turn: with up to SPEAKERS ranks that is all of them at every step.

Shapes:  vector float64 [HEADER + NOTE + (1 + sums) L + speakers (1 + maxima L)];
         squares of norms add up, norms do not.
Errors:  say() raises LostError; nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sentinel.core.types import NOT_MEASURED
from sentinel_hooks.ranks.group import Group, LostError

Float64 = npt.NDArray[np.float64]

MODULUS = 4096
NOTE_BYTES = 960  # of rank 0: orders, rate, batch id
_BYTES_EACH = 6
NOTE = NOTE_BYTES // _BYTES_EACH
SPEAKERS = 4
DIGESTS = 4

_EQUAL = ("kind", "seq", "attempt", "action", "flying", *(f"print{i}" for i in range(DIGESTS)))
_SUMS = (
    "ranks",
    "blind",
    "off",
    "applied",
    "loss",
    "losses",
    "norm_sq",
    "norms",
    "params_bad",
    "taken",
    "untaken",
    "written",
    "unwritten",
    "ready",
    "ok",
    "failed",
    "failed_ranks",
    "first",
    "second",
    "note_bytes",
)
_AT = {name: i for i, name in enumerate(_SUMS)}
_AT |= {name: len(_SUMS) + 2 * i for i, name in enumerate(_EQUAL)}
HEADER = len(_SUMS) + 2 * len(_EQUAL)


class Kind(enum.IntEnum):
    """What a reduce is about."""

    STEP = 1  # the gate of a logical step
    CANARY = 2  # the canary's answer
    VOTE = 3  # one phase of a rollback
    LATE = 4  # a later gate of the group, whose gradients are newer than the decision
    COMPARE = 5  # the parameters, after ranks acted differently
    COPIES = 6  # at attach: do the shares of all ranks add up to one model?


@dataclass(frozen=True, slots=True)
class Layout:
    """What a vector has room for; equal on all ranks.

    Attributes:
        layers: L.
        sums, maxima: names of per-layer parts, by how they combine.
    """

    layers: int = 0
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()

    @property
    def added(self) -> int:
        """Entries of what is added up per layer."""
        return (1 + len(self.sums)) * self.layers

    def size(self, world: int) -> int:
        """Entries of a vector."""
        return HEADER + NOTE + self.added + speakers(world) * self.place

    @property
    def place(self) -> int:
        """Entries of one speaker: a mark that it is used, and the maxima."""
        return 1 + len(self.maxima) * self.layers if self.maxima else 0


def speakers(world: int) -> int:
    """Places for maxima."""
    return min(world, SPEAKERS)


def speaks(rank: int, seq: int, world: int) -> bool:
    """This rank has a place at this step."""
    turns = -(-world // speakers(world))
    return rank // speakers(world) == seq % turns


@dataclass(slots=True)
class Says:
    """One rank's part; None and False are "nothing".

    Attributes:
        blind: measuring failed here.
        off: this rank cannot go on guarding; all switch off together.
        action: digest of what this rank carried out at the last step.
        applied: its optimizer moved at the last step.
        total_sq: its share of the global norm's square: a parameter that n ranks hold counts 1/n.
        taken: the snapshot due at the last safe point: True copied, False failed, None none due.
        written: its part of the save in flight: True written, False failed, None not known yet.
        flying: the step of the save to disk that is on its way, plus one; 0 for none.
        ready: a canary batch old enough is kept here.
        ok: a vote, or "this is finite"; None abstains.
        values: two numbers to be averaged.
        digest: of this rank's parameters.
        note: rank 0's bytes, at most NOTE_BYTES.
        parts: of the layout's names, float64 [L]; those that were not measured are left out.
    """

    kind: Kind
    attempt: int = 0
    blind: bool = False
    off: bool = False
    action: int = 0
    applied: bool = False
    loss: float | None = None
    total_sq: float | None = None
    layer_sq_L: Float64 | None = None
    params_bad: bool = False
    taken: bool | None = None
    written: bool | None = None
    flying: int = 0
    ready: bool = False
    ok: bool | None = None
    values: tuple[float, float] = (0.0, 0.0)
    digest: bytes = b""
    note: bytes = b""
    parts: Mapping[str, Float64] = field(default_factory=dict)


@dataclass(slots=True)
class Heard:
    """What all ranks together said; equal on every rank.

    Attributes:
        in_step: all spoke of the same thing, step and attempt.
        acted_alike: all carried out the same action at the last step.
        applied: how many ranks' optimizers moved at the last step.
        loss: the mean over the ranks that saw one.
        failed_ranks: sum of the numbers of the ranks that voted no: the number itself if one did.
    """

    ranks: int
    in_step: bool
    blind: int
    off: int
    acted_alike: bool
    applied: int
    loss: float | None
    total_sq: float | None
    layer_sq_L: Float64 | None
    params_bad: int
    taken: int
    untaken: int
    written: int
    unwritten: int
    same_flight: bool
    ready: int
    ok: int
    failed: int
    failed_ranks: int
    values: tuple[float, float]
    same_digest: bool
    note: bytes = b""
    parts: dict[str, Float64] = field(default_factory=dict)

    def who_failed(self) -> str:
        """For a reason that must read the same on every rank."""
        if self.failed == 1:
            return f"rank {self.failed_ranks} of {self.ranks}"
        return f"{self.failed} of {self.ranks} ranks"


@dataclass(slots=True)
class Agreement:
    """The conversation of one session's ranks."""

    group: Group
    layout: Layout
    seq: int = 0
    counts: dict[Kind, int] = field(default_factory=dict)
    _total: Float64 | None = None  # what the last reduce gave, and which it was
    _total_of: int = 0

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world(self) -> int:
        return self.group.world

    def say(self, says: Says) -> Heard:
        """Tell all, hear all.

        Raises:
            LostError: a rank is gone or did not come in time.
        """
        self.seq += 1
        self.counts[says.kind] = self.counts.get(says.kind, 0) + 1
        return self._say(says)

    def say_again(self, says: Says, seq: int) -> Heard:
        """An error of our own has ended say(): what is left of it. The reduce is entered once.

        Args:
            seq: of what was to be said.

        Raises:
            LostError: as say(); or it failed again, and the others must not wait for this rank.
        """
        self.seq = seq
        try:
            return self._say(says)
        except LostError:
            raise
        except Exception as error:
            self.group.close(f"this rank cannot speak: {type(error).__name__}: {error}")
            raise LostError(self.group.why_lost) from error

    def _say(self, says: Says) -> Heard:
        world = self.group.world
        if self._total is None or self._total_of != self.seq:
            vector = pack(says, self.seq, self.group.rank, world, self.layout)
            completed = self.group.completed
            try:
                self.group.reduce(vector)
            finally:
                if self.group.completed > completed:
                    self._total, self._total_of = vector, self.seq
        assert self._total is not None
        return unpack(self._total, world, self.layout)


def pack(says: Says, seq: int, rank: int, world: int, layout: Layout) -> Float64:
    """One rank's vector."""
    vector = np.zeros(layout.size(world))
    layers = layout.layers
    digest = says.digest[: DIGESTS * 2].ljust(DIGESTS * 2, b"\0")
    equal = {
        "kind": int(says.kind),
        "seq": seq,
        "attempt": says.attempt,
        "action": says.action,
        "flying": says.flying,
        **{
            f"print{i}": int.from_bytes(digest[2 * i : 2 * i + 2], "little") for i in range(DIGESTS)
        },
    }
    for name, value in equal.items():
        at, whole = _AT[name], value % MODULUS
        vector[at], vector[at + 1] = whole, whole * whole
    vector[_AT["ranks"]] = 1.0
    vector[_AT["blind"]] = says.blind
    vector[_AT["off"]] = says.off
    vector[_AT["applied"]] = says.applied
    if says.loss is not None:
        vector[_AT["loss"]] = says.loss
        vector[_AT["losses"]] = 1.0
    if says.total_sq is not None and says.layer_sq_L is not None:
        vector[_AT["norm_sq"]] = says.total_sq
        vector[_AT["norms"]] = 1.0
        vector[HEADER + NOTE : HEADER + NOTE + layers] = says.layer_sq_L
    if says.parts:
        at = HEADER + NOTE + layers
        for i, name in enumerate(layout.sums):
            if name in says.parts:
                vector[at + i * layers : at + (i + 1) * layers] = says.parts[name]
    if layout.maxima and says.kind is Kind.STEP and speaks(rank, seq, world):
        at = HEADER + NOTE + layout.added + rank % speakers(world) * layout.place
        vector[at] = 1.0
        vector[at + 1 : at + layout.place] = NOT_MEASURED
        for i, name in enumerate(layout.maxima):
            if name in says.parts:
                start = at + 1 + i * layers
                vector[start : start + layers] = says.parts[name]
    vector[_AT["params_bad"]] = says.params_bad
    for yes, no, said in (
        ("taken", "untaken", says.taken),
        ("written", "unwritten", says.written),
        ("ok", "failed", says.ok),
    ):
        if said is not None:
            vector[_AT[yes if said else no]] = 1.0
    vector[_AT["failed_ranks"]] = rank if says.ok is False else 0
    vector[_AT["ready"]] = says.ready
    vector[_AT["first"]], vector[_AT["second"]] = says.values
    if rank == 0 and says.note:
        size = len(says.note)
        if size > NOTE_BYTES:
            raise ValueError(f"a note is at most {NOTE_BYTES} bytes, got {size}")
        padded = np.frombuffer(says.note.ljust(NOTE_BYTES, b"\0"), np.uint8)
        wide = np.zeros((NOTE, 8), np.uint8)
        wide[:, :_BYTES_EACH] = padded.reshape(NOTE, _BYTES_EACH)
        vector[HEADER : HEADER + NOTE] = wide.view("<u8")[:, 0]
        vector[_AT["note_bytes"]] = size
    return vector


def unpack(total: Float64, world: int, layout: Layout) -> Heard:
    """What the sum of all ranks' vectors says."""

    def count(name: str) -> int:
        return int(total[_AT[name]])

    def same(name: str) -> bool:
        at = _AT[name]
        return bool(world * total[at + 1] == total[at] ** 2)

    losses, norms = count("losses"), count("norms")
    in_step = count("ranks") == world and same("kind") and same("seq") and same("attempt")
    note = b""
    size = count("note_bytes")
    if in_step and size:
        wide = total[HEADER : HEADER + NOTE].astype("<u8").view(np.uint8).reshape(NOTE, 8)
        note = wide[:, :_BYTES_EACH].tobytes()[:size]
    layers = layout.layers
    parts: dict[str, Float64] = {}
    if in_step:
        at = HEADER + NOTE + layers
        for i, name in enumerate(layout.sums):
            parts[name] = total[at + i * layers : at + (i + 1) * layers]
        if layout.maxima:
            places = total[HEADER + NOTE + layout.added :].reshape(speakers(world), layout.place)
            used = places[places[:, 0] == 1.0, 1:].reshape(-1, len(layout.maxima), layers)
            if len(used):
                best = used.max(axis=0)  # nan wins
                parts |= {name: best[i] for i, name in enumerate(layout.maxima)}
    return Heard(
        ranks=world,
        in_step=in_step,
        blind=count("blind"),
        off=count("off"),
        acted_alike=same("action"),
        applied=count("applied"),
        loss=float(total[_AT["loss"]] / losses) if losses else None,
        total_sq=float(total[_AT["norm_sq"]]) if norms else None,
        layer_sq_L=total[HEADER + NOTE : HEADER + NOTE + layers] if norms else None,
        params_bad=count("params_bad"),
        taken=count("taken"),
        untaken=count("untaken"),
        written=count("written"),
        unwritten=count("unwritten"),
        same_flight=same("flying"),
        ready=count("ready"),
        ok=count("ok"),
        failed=count("failed"),
        failed_ranks=count("failed_ranks"),
        values=(float(total[_AT["first"]]) / world, float(total[_AT["second"]]) / world),
        same_digest=all(same(f"print{i}") for i in range(DIGESTS)),
        note=note,
        parts=parts,
    )
