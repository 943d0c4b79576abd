"""What session.status() answers: one value, readable as it is printed.

print(session.status())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sentinel.core.state import Counters, Incident
from sentinel.core.types import Mode, Protection
from sentinel_hooks.link import LinkStatus

NAMED = 3  # layers of an incident


@dataclass(frozen=True, slots=True)
class BlindSpot:
    """Something sentinel cannot see or do here, and the way out."""

    what: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.what}; {self.way_out}" if self.way_out else self.what


@dataclass(frozen=True, slots=True)
class Status:
    """How the run and its protection are doing.

    Attributes:
        step: the next step to be decided.
        why: one sentence to `protection`.
        canary: "available", or why not and the way out.
        candidate: step of the snapshot that waits to be confirmed.
        healthy: steps of snapshots that a rollback may use, oldest first.
        on_disk: steps of snapshots that this process has on disk.
        incidents: all that are open, firing ones first, then the newest that are over.
        layer_names: of the layers that the incidents name, by their index in the layer table.
        scaler_skips: steps that the gradient scaler left out by itself, since attach().
        late_skips: optimizers of a group that were held back on their own, because a gradient
            made after the group's decision was not finite.
        internal_errors: sentinel's own errors that were caught, by place.
        lineage: of a run that was restarted: which of its weights it went on with.
        self_check: whether what is promised is seen, by the first steps; see selfcheck.py.
        notes: what was settled by itself and a reader should know; no loss of protection.
        reads: with reads="late": how many steps had to be read at once, and why.
        rank: of this process among the `ranks` that act together.
    """

    run_id: str
    step: int
    mode: Mode
    policy: str
    protection: Protection
    why: str
    blind_spots: tuple[BlindSpot, ...]
    canary: str
    candidate: int | None
    healthy: tuple[int, ...]
    snapshot_bytes: int
    counters: Counters
    link: LinkStatus
    incidents: tuple[Incident, ...] = ()
    layer_names: Mapping[int, str] = field(default_factory=dict)
    scaler_skips: int = 0
    late_skips: int = 0
    on_disk: tuple[int, ...] = ()
    internal_errors: Mapping[str, int] = field(default_factory=dict)
    directory: str = ""
    lineage: str = ""
    self_check: str = ""
    reads: str = ""
    notes: tuple[str, ...] = ()
    rank: int = 0
    ranks: int = 1

    def __str__(self) -> str:
        c = self.counters
        lines = [
            f"sentinel run={self.run_id} step={self.step} policy={self.policy} mode={self.mode}",
            f"  protection: {self.protection} ({self.why})",
        ]
        if self.ranks > 1:
            lines.append(f"  rank {self.rank} of {self.ranks}, which decide and act together")
        if self.self_check:
            lines.append(f"  self-check: {self.self_check}")
        if self.reads:
            lines.append(f"  reads: {self.reads}")
        lines += [f"  blind spot: {spot}" for spot in self.blind_spots]
        lines += [f"  note: {note}" for note in self.notes]
        if self.lineage:
            lines.append(f"  restarted: {self.lineage}")
        lines.append(f"  canary: {self.canary}")
        candidate = "none" if self.candidate is None else f"step {self.candidate}"
        healthy = ", ".join(map(str, self.healthy)) or "none"
        lines.append(
            f"  snapshots: healthy at {healthy}; candidate {candidate}; "
            f"{self.snapshot_bytes / 2**20:.1f} MiB of host memory"
            + (f"; on disk {', '.join(map(str, self.on_disk))}" if self.on_disk else "")
        )
        lines.append(
            f"  so far: {c.steps} steps, {_sum(c.skipped)} skipped{_by(c.skipped)}, "
            f"{_sum(c.rollbacks)} rollbacks{_by(c.rollbacks)}, {c.spike_steps} spike steps, "
            f"{c.lost_steps} lost"
        )
        if c.would:
            lines.append(f"  would have acted: {_sum(c.would)}{_by(c.would)}")
        if self.scaler_skips:
            lines.append(
                f"  left out by the gradient scaler: {self.scaler_skips} steps that overflowed; "
                "its own doing, and among the lost ones"
            )
        if self.late_skips:
            lines.append(f"  held back on their own: {self.late_skips} optimizer steps")
        link = self.link
        lines.append(
            f"  sidecar: {link.state}{f' {link.url}' if link.url else ''}"
            f"{f' ({link.detail})' if link.detail else ''}"
        )
        for incident in self.incidents:
            lines.append(
                f"  incident i-{incident.number} {incident.state} {incident.severity} since step "
                f"{incident.opened}: {incident.summary}"
            )
            if incident.layers:
                lines.append(f"    layers: {named(incident.layers, self.layer_names)}")
        if self.internal_errors:
            errors = ", ".join(f"{k}={v}" for k, v in sorted(self.internal_errors.items()))
            lines.append(f"  sentinel's own errors, caught: {errors}")
        if self.directory:
            lines.append(f"  trace: {self.directory}")
        return "\n".join(lines)


def named(layers: Sequence[int], names: Mapping[int, str]) -> str:
    """The first layers by name, and how many more there are."""
    few = ", ".join(names.get(i, f"layer {i}") for i in layers[:NAMED])
    return few if len(layers) <= NAMED else f"{few}, +{len(layers) - NAMED}"


def _sum(counts: tuple[tuple[str, int], ...]) -> int:
    return sum(n for _, n in counts)


def _by(counts: tuple[tuple[str, int], ...]) -> str:
    return f" ({', '.join(f'{k} {n}' for k, n in counts)})" if counts else ""
