"""The exporter: what the runs know, as Prometheus text.

    render(runs, now, version, openmetrics=False) -> bytes

Walks core.catalog, so that a metric which is not in the list cannot be exported. A signal that was
not measured has no sample; a NaN is written as NaN, since it is what was measured.

Units:   base units, see the catalogue.
Purity:  no clock, no I/O; reads the runs and changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from sentinel.core.catalog import CATALOG, PROTECTIONS, RUN_STATES, Kind, MetricSpec
from sentinel.core.state import Ledger
from sentinel.core.types import IncidentState
from sentinel.sidecar.runs import Histogram, Run, Runs

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Sample = tuple[tuple[str, ...], float | None]
Source = Callable[[Run, float], Iterable[Sample]]


def number(value: float) -> str:
    """A value as Prometheus writes it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def escape(label: str) -> str:
    """A label's value between its quotes."""
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _labels(names: Iterable[str], values: Iterable[str]) -> str:
    pairs = [f'{n}="{escape(v)}"' for n, v in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def render(runs: Runs, now: float, version: str, *, openmetrics: bool = False) -> bytes:
    """All metrics of all runs.

    Args:
        openmetrics: in the OpenMetrics format, else in Prometheus's own text format.
    """
    lines: list[str] = []
    for spec in CATALOG:
        if spec.reserved:
            continue
        body = list(_body(spec, runs, now, version))
        if not body:
            continue
        family = spec.full_name
        if openmetrics and spec.kind is Kind.COUNTER:
            family = family.removesuffix("_total")
        lines.append(f"# HELP {family} {spec.help}")
        lines.append(f"# TYPE {family} {spec.kind}")
        if openmetrics and spec.unit:
            lines.append(f"# UNIT {family} {spec.unit}")
        lines += body
    if openmetrics:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode()


def _body(spec: MetricSpec, runs: Runs, now: float, version: str) -> Iterator[str]:
    if not spec.per_run:
        yield f"{spec.full_name}{_labels(spec.labels, (version,))} 1.0"
        return
    names = ("run", *spec.labels)
    for run in runs.runs.values():
        if spec.kind is Kind.HISTOGRAM:
            yield from _histogram(spec, run)
            continue
        for values, value in SOURCES[spec.name](run, now):
            if value is not None:
                yield f"{spec.full_name}{_labels(names, (run.name, *values))} {number(value)}"


def _histogram(spec: MetricSpec, run: Run) -> Iterator[str]:
    histogram = HISTOGRAMS[spec.name](run)
    name, under = spec.full_name, 0
    for bound, count in zip(spec.buckets, histogram.counts or [0] * len(spec.buckets), strict=True):
        under += count
        yield f"{name}_bucket{_labels(('run', 'le'), (run.name, number(bound)))} {number(under)}"
    yield (f"{name}_bucket{_labels(('run', 'le'), (run.name, '+Inf'))} {number(histogram.count)}")
    yield f"{name}_sum{_labels(('run',), (run.name,))} {number(histogram.total)}"
    yield f"{name}_count{_labels(('run',), (run.name,))} {number(histogram.count)}"


# ---- where each metric comes from ------------------------------------------------------


def _one(value: float | bool | None) -> Iterable[Sample]:
    return (((), None if value is None else float(value)),)


def _table(counts: Iterable[tuple[str, int]]) -> Iterable[Sample]:
    return [((key,), float(count)) for key, count in counts]


def _split(counts: Iterable[tuple[str, int]]) -> Iterable[Sample]:
    """Counts by "a/b" as two labels."""
    found: list[Sample] = []
    for key, count in counts:
        first, _, second = key.partition("/")
        found.append(((first, second), float(count)))
    return found


def _states(all_: Iterable[str], current: str) -> Iterable[Sample]:
    return [((state,), float(state == current)) for state in all_]


def _ledger(run: Run) -> Ledger | None:
    return None if run.state is None else run.state.ledger


def _layers(column: str) -> Source:
    def source(run: Run, now: float) -> Iterable[Sample]:
        values = run.columns.get(column)
        if values is None:
            return ()
        return [
            ((layer.name,), float(value))
            for layer, value in zip(run.layers, values.tolist(), strict=False)
        ][: run.max_layers]

    return source


def _left_out(run: Run, now: float) -> Iterable[Sample]:
    return _one(max(len(run.layers) - run.max_layers, 0))


def _protection(run: Run, now: float) -> Iterable[Sample]:
    guarded = run.decision is not None and run.run_state == "running"
    current = str(run.decision.readings.protection) if guarded and run.decision else "off"
    return _states(PROTECTIONS, current)


def _info(run: Run, now: float) -> Iterable[Sample]:
    policy = run.policy
    labels = (policy.name, str(policy.mode), str(run.engine_version), run.incarnation)
    return ((labels, 1.0),)


def _incidents(run: Run, now: float) -> Iterable[Sample]:
    ledger = _ledger(run)
    if ledger is None:
        return ()
    silenced = {key for key, until in run.silenced.items() if until > now}
    open_ = Counter(
        (
            "silenced"
            if (i.number, i.opened) in silenced and i.state is not IncidentState.RESOLVED
            else str(i.state),
            str(i.severity),
        )
        for i in ledger.incidents
    )
    return [(key, float(count)) for key, count in sorted(open_.items())]


def _last_good(run: Run, now: float) -> Iterable[Sample]:
    ledger = _ledger(run)
    healthy = [] if ledger is None else [s.step for s in ledger.snapshots if s.healthy]
    return _one(max(healthy) if healthy else None)


def _paused(run: Run, now: float) -> Iterable[Sample]:
    ledger = _ledger(run)
    return _one(None if ledger is None else not ledger.automation)


def _steps(run: Run, now: float) -> Iterable[Sample]:
    ledger = _ledger(run)
    return _one(run.seen.count if ledger is None else ledger.counters.steps)


def _skipped(run: Run, now: float) -> Iterable[Sample]:
    ledger = _ledger(run)
    return _table(sorted(run.own.items()) if ledger is None else ledger.counters.skipped)


def _counted(get: Callable[[Ledger], Iterable[Sample]]) -> Source:
    def source(run: Run, now: float) -> Iterable[Sample]:
        ledger = _ledger(run)
        return () if ledger is None else get(ledger)

    return source


def _seen(name: str) -> Source:
    def source(run: Run, now: float) -> Iterable[Sample]:
        value = None if run.observation is None else getattr(run.observation, name)
        return _one(value)

    return source


def _reading(name: str) -> Source:
    def source(run: Run, now: float) -> Iterable[Sample]:
        value = None if run.decision is None else getattr(run.decision.readings, name)
        return _one(value)

    return source


SOURCES: dict[str, Source] = {
    "run_info": _info,
    "run_state": lambda run, now: _states(RUN_STATES, run.run_state),
    "protection": _protection,
    "automation_paused": _paused,
    "step": _seen("step"),
    "attempt": _counted(lambda ledger: _one(ledger.attempt)),
    "last_report_timestamp_seconds": lambda run, now: _one(run.last_report),
    "loss": _seen("loss"),
    "loss_spike_score": _reading("spike_score"),
    "loss_spike_score_window_max": lambda run, now: _one(run.score_max.value(now)),
    "learning_rate": _seen("lr"),
    "learning_rate_factor": lambda run, now: _one(
        None if run.decision is None else run.decision.lr_factor
    ),
    "loss_scale": _seen("loss_scale"),
    "grad_norm": _seen("grad_norm"),
    "grad_norm_baseline": _reading("norm_baseline"),
    "grad_norm_window_max": lambda run, now: _one(run.norm_max.value(now)),
    "layer_grad_norm": _layers("layer_grad_norm"),
    "layer_update_ratio": _layers("layer_update_ratio"),
    "layer_attention_max_logit": _layers("layer_attention_max_logit"),
    "layer_activation_rms": _layers("layer_activation_rms"),
    "attention_max_logit_window_max": lambda run, now: _one(run.logit_max.value(now)),
    "layers_left_out": _left_out,
    "last_good_snapshot_step": _last_good,
    "incidents": _incidents,
    "steps_total": _steps,
    "skipped_steps_total": _skipped,
    "rollbacks_total": _counted(lambda ledger: _split(ledger.counters.rollbacks)),
    "would_act_total": _counted(lambda ledger: _split(ledger.counters.would)),
    "lost_steps_total": _counted(lambda ledger: _one(ledger.counters.lost_steps)),
    "nonfinite_steps_total": _counted(lambda ledger: _table(ledger.counters.nonfinite)),
    "loss_spike_steps_total": _counted(lambda ledger: _one(ledger.counters.spike_steps)),
    "flags_total": _counted(lambda ledger: _table(ledger.counters.flags)),
    "decisions_total": lambda run, now: _table(sorted(run.decided.items())),
    "decision_misses_total": lambda run, now: _table(sorted(run.counts.misses.items())),
    "decision_mismatches_total": lambda run, now: _one(run.counts.mismatches),
    "reports_dropped_total": lambda run, now: ((("buffer_full",), float(run.counts.dropped)),),
    "reports_late_total": lambda run, now: _one(run.late),
    "state_handovers_total": lambda run, now: _one(run.handovers),
    "internal_errors_total": lambda run, now: [
        *_table((f"sidecar_{where}", count) for where, count in sorted(run.errors.items())),
        *_table(sorted(run.counts.internal_errors.items())),
    ],
    "decision_longest_wait_seconds": lambda run, now: _one(run.counts.longest_wait_s),
}
HISTOGRAMS: dict[str, Callable[[Run], Histogram]] = {
    "decision_duration_seconds": lambda run: run.duration,
}
