"""Metrics as text: what a run knows, in Prometheus's format, without any library or service.

    page = Textfile("r7", policy=policy, incarnation="1a2b", layers=names)
    page.note(observation, decision, now)                       at every step
    text = page.render(state, run_state="running", now=now)     now and then: for node_exporter

An embedded run writes that text to a .prom file, which node_exporter's textfile collector picks up;
the sidecar's exporter takes the same SOURCES, so that both give the same names the same meaning.
Window maxima keep a one-step spike visible until it was scraped. A signal that was not measured
has no sample; a NaN is written as NaN, since it is what was measured.

Units:   base units, see core.catalog; `now` is Unix seconds.
Purity:  no clock, no I/O.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from sentinel.core.catalog import CATALOG, PROTECTIONS, RUN_STATES, Kind
from sentinel.core.policy import Policy
from sentinel.core.state import ENGINE_VERSION, Ledger, State
from sentinel.core.types import (
    LAYER_ATTENTION_MAX_LOGIT,
    NOT_MEASURED,
    Column,
    Decision,
    Observation,
)

WINDOW_S = 60.0  # window maxima cover one to two of these
TEXTFILE_LAYERS = 20  # the largest ones of each signal
SIGNALS = (
    "layer_grad_norm",
    "layer_update_ratio",
    "layer_attention_max_logit",
    "layer_activation_rms",
)

Sample = tuple[tuple[str, ...], float | None]


class WindowMax:
    """The largest value of the last one to two windows; NaN counts as nothing."""

    def __init__(self) -> None:
        self._window = -1
        self._now = self._before = -math.inf

    def add(self, value: float | None, now: float) -> None:
        """Note a value."""
        self._turn(now)
        if value is not None and value > self._now:
            self._now = value

    def value(self, now: float) -> float | None:
        """The maximum, None when nothing came."""
        self._turn(now)
        most = max(self._now, self._before)
        return None if most == -math.inf else most

    def _turn(self, now: float) -> None:
        window = int(now // WINDOW_S)
        if window == self._window:
            return
        self._before = self._now if window == self._window + 1 else -math.inf
        self._now = -math.inf
        self._window = window


class View(Protocol):
    """What SOURCES read of a run."""

    @property
    def policy(self) -> Policy: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def engine_version(self) -> int: ...
    @property
    def run_state(self) -> str: ...
    @property
    def last_report(self) -> float: ...
    @property
    def state(self) -> State | None: ...
    @property
    def observation(self) -> Observation | None: ...
    @property
    def decision(self) -> Decision | None: ...
    @property
    def said(self) -> str: ...
    @property
    def gauges(self) -> Mapping[str, float]: ...
    @property
    def norm_max(self) -> WindowMax: ...
    @property
    def score_max(self) -> WindowMax: ...
    @property
    def logit_max(self) -> WindowMax: ...


Source = Callable[[View, float], Iterable[Sample]]


def number(value: float) -> str:
    """A value as Prometheus writes it."""
    if math.isfinite(value):
        return repr(float(value))
    if math.isnan(value):
        return "NaN"
    return "+Inf" if value > 0 else "-Inf"


def escape(label: str) -> str:
    """A label's value between its quotes."""
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def labels(names: Iterable[str], values: Iterable[str]) -> str:
    """All labels of a sample, in braces."""
    pairs = [f'{n}="{escape(v)}"' for n, v in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}" if pairs else ""


# ---- where each metric comes from ------------------------------------------------------


def one(value: float | bool | None) -> Iterable[Sample]:
    """A single sample without labels of its own."""
    return (((), None if value is None else float(value)),)


def table(counts: Iterable[tuple[str, int]]) -> Iterable[Sample]:
    """Counts by one label."""
    return [((key,), float(count)) for key, count in counts]


def split(counts: Iterable[tuple[str, int]]) -> Iterable[Sample]:
    """Counts by "a/b" as two labels."""
    found: list[Sample] = []
    for key, count in counts:
        first, _, second = key.partition("/")
        found.append(((first, second), float(count)))
    return found


def states(all_: Iterable[str], current: str) -> Iterable[Sample]:
    """1 for the current one, 0 for all others."""
    return [((state,), float(state == current)) for state in all_]


def _protection(run: View, now: float) -> Iterable[Sample]:
    decision = run.decision
    guarded = decision is not None and run.run_state == "running"
    current = "off"
    if guarded and decision:  # what the trainer has said since is the newer word
        current = run.said or str(decision.readings.protection)
    return states(PROTECTIONS, current)


def _info(run: View, now: float) -> Iterable[Sample]:
    policy = run.policy
    values = (policy.name, str(policy.mode), str(run.engine_version), run.incarnation)
    return ((values, 1.0),)


def _incidents(ledger: Ledger) -> Iterable[Sample]:
    found = Counter((str(i.state), str(i.severity)) for i in ledger.incidents)
    return [(key, float(count)) for key, count in sorted(found.items())]


def _last_good(ledger: Ledger) -> Iterable[Sample]:
    healthy = [s.step for s in ledger.snapshots if s.healthy]
    return one(max(healthy) if healthy else None)


def counted(get: Callable[[Ledger], Iterable[Sample]]) -> Source:
    """From the ledger; nothing while it is not known."""

    def source(run: View, now: float) -> Iterable[Sample]:
        return () if run.state is None else get(run.state.ledger)

    return source


def _seen(name: str) -> Source:
    def source(run: View, now: float) -> Iterable[Sample]:
        return one(None if run.observation is None else getattr(run.observation, name))

    return source


def _reading(name: str) -> Source:
    def source(run: View, now: float) -> Iterable[Sample]:
        return one(None if run.decision is None else getattr(run.decision.readings, name))

    return source


def _gauge(name: str) -> Source:
    return lambda run, now: one(run.gauges.get(name))


def _memory(run: View, now: float) -> Iterable[Sample]:
    return [
        ((key.partition("/")[2],), value)
        for key, value in sorted(run.gauges.items())
        if key.startswith("memory_bytes/")
    ]


SOURCES: dict[str, Source] = {
    "run_info": _info,
    "run_state": lambda run, now: states(RUN_STATES, run.run_state),
    "protection": _protection,
    "automation_paused": counted(lambda ledger: one(not ledger.automation)),
    "step": _seen("step"),
    "attempt": counted(lambda ledger: one(ledger.attempt)),
    "last_report_timestamp_seconds": lambda run, now: one(run.last_report),
    "loss": _seen("loss"),
    "loss_spike_score": _reading("spike_score"),
    "loss_spike_score_window_max": lambda run, now: one(run.score_max.value(now)),
    "learning_rate": _seen("lr"),
    "learning_rate_factor": lambda run, now: one(
        None if run.decision is None else run.decision.lr_factor
    ),
    "loss_scale": _seen("loss_scale"),
    "grad_norm": _seen("grad_norm"),
    "grad_norm_baseline": _reading("norm_baseline"),
    "grad_norm_window_max": lambda run, now: one(run.norm_max.value(now)),
    "attention_max_logit_window_max": lambda run, now: one(run.logit_max.value(now)),
    "memory_bytes": _memory,
    "tokens_per_second": _gauge("tokens_per_second"),
    "clipped_step_ratio": _gauge("clipped_step_ratio"),
    "self_check_failures": _gauge("self_check_failures"),
    "last_good_snapshot_step": counted(_last_good),
    "incidents": counted(_incidents),
    "steps_total": counted(lambda ledger: one(ledger.counters.steps)),
    "skipped_steps_total": counted(lambda ledger: table(ledger.counters.skipped)),
    "rollbacks_total": counted(lambda ledger: split(ledger.counters.rollbacks)),
    "would_act_total": counted(lambda ledger: split(ledger.counters.would)),
    "lost_steps_total": counted(lambda ledger: one(ledger.counters.lost_steps)),
    "nonfinite_steps_total": counted(lambda ledger: table(ledger.counters.nonfinite)),
    "loss_spike_steps_total": counted(lambda ledger: one(ledger.counters.spike_steps)),
    "flags_total": counted(lambda ledger: table(ledger.counters.flags)),
}


# ---- a run without any service -----------------------------------------------------------


class Textfile:
    """The metrics of one embedded run; see the module docstring."""

    def __init__(
        self, run: str, *, policy: Policy, incarnation: str = "", layers: Sequence[str] = ()
    ) -> None:
        self.run = run
        self.policy = policy
        self.incarnation = incarnation
        self.engine_version = ENGINE_VERSION
        self.layers = tuple(layers)
        self.run_state = "running"
        self.last_report = 0.0
        self.state: State | None = None
        self.observation: Observation | None = None
        self.decision: Decision | None = None
        self.said = ""
        self.gauges: Mapping[str, float] = {}
        self.norm_max, self.score_max, self.logit_max = WindowMax(), WindowMax(), WindowMax()
        self._columns: dict[str, Column] = {}

    def note(self, observation: Observation, decision: Decision, now: float) -> None:
        """One step; 2 us."""
        self.observation, self.decision, self.last_report = observation, decision, now
        self.norm_max.add(observation.grad_norm, now)
        self.score_max.add(decision.readings.spike_score, now)
        if observation.columns:
            self._columns.update(observation.columns)
            logits = observation.columns.get(LAYER_ATTENTION_MAX_LOGIT)
            if logits is not None and logits.size:
                self.logit_max.add(float(logits.max()), now)

    def render(
        self,
        state: State | None,
        *,
        run_state: str,
        now: float,
        gauges: Mapping[str, float] | None = None,
        internal_errors: Mapping[str, int] | None = None,
        said: str = "",
    ) -> str:
        """The whole text; write it to a temporary file and rename that.

        Args:
            state: the engine's state.
            run_state: one of catalog.RUN_STATES.
            gauges: what else is measured: tokens_per_second, clipped_step_ratio, and
                "memory_bytes/KIND".
            internal_errors: errors of sentinel's own, by where they were caught.
            said: the protection now, where it is no longer what the newest decision says; else "".
        """
        self.state, self.run_state, self.said = state, run_state, said
        self.gauges = gauges or {}
        errors = table(sorted((internal_errors or {}).items()))
        parts = []
        for spec in CATALOG:
            if spec.reserved or spec.kind is Kind.HISTOGRAM or not spec.per_run:
                continue
            if spec.name in SIGNALS:
                samples: Iterable[Sample] = self._of_layers(spec.name)
            elif spec.name == "internal_errors_total":
                samples = errors
            elif spec.name in SOURCES:
                samples = SOURCES[spec.name](self, now)
            else:
                continue  # a sidecar's
            names = ("run", *spec.labels)
            lines = [
                f"{spec.full_name}{labels(names, (self.run, *values))} {number(value)}\n"
                for values, value in samples
                if value is not None
            ]
            if lines:
                parts.append(f"# HELP {spec.full_name} {spec.help}\n")
                parts.append(f"# TYPE {spec.full_name} {spec.kind}\n")
                parts += lines
        return "".join(parts)

    def _of_layers(self, name: str) -> Iterator[Sample]:
        values = self._columns.get(name)
        if values is None:
            return
        count = min(len(values), len(self.layers))
        size = np.abs(values[:count].astype(np.float64))
        size[values[:count] == NOT_MEASURED] = -1.0
        size[np.isnan(size)] = np.inf
        largest = np.sort(np.argsort(-size, kind="stable")[:TEXTFILE_LAYERS])
        for at in largest.tolist():
            if values[at] != NOT_MEASURED:
                yield (self.layers[at],), float(values[at])
