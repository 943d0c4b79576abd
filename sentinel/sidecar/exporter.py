"""The exporter: what the runs and the sidecar itself know, as Prometheus text.

    text = await render(service, version, openmetrics=False, layers=Layers.TOP)

Walks core.catalog, so that a metric which is not in the list cannot be exported. A signal that was
not measured has no sample; a NaN is written as NaN, since it is what was measured. Of a run with
many layers the TOP largest of each signal have series of their own, and quantiles speak for the
rest; a layer keeps its place until another is a quarter larger, so that series do not flicker.
With `layers=all` there are up to Settings.max_layers of them, and `layers_left_out` says how many
are not. Runs that are over are exported for ENDED_S, lost ones for LOST_S. In OpenMetrics, counters
of what was done carry an exemplar.

Cost:    lines are laid out once: what a scrape formats are numbers. It gives way to the event loop
         every TURN_S, so that no decision waits for a scrape.
Units:   base units, see the catalogue; `now` is Unix seconds.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from sentinel.core import exposition
from sentinel.core.catalog import CATALOG, RUN_STATES, Kind, MetricSpec
from sentinel.core.exposition import SIGNALS, Sample, labels, number, one, table
from sentinel.core.types import NOT_MEASURED, Column, IncidentState
from sentinel.sidecar.exemplars import FIELDS
from sentinel.sidecar.grafana import Keeper, Writer
from sentinel.sidecar.runs import Histogram, Run
from sentinel.sidecar.service import Service
from sentinel.sidecar.verify import Result

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

TOP = 20  # layers of each signal with series of their own
STICKY = 1.25
QUANTILES = (0.0, 0.5, 0.9, 1.0)
ENDED_S, LOST_S = 600.0, 3600.0
TURN_S = 0.002

Source = Callable[[Run, float], Iterable[Sample]]
SidecarSource = Callable[[Service, float], Iterable[Sample]]


class Layers(StrEnum):
    """Which layers get series of their own."""

    TOP = "top"
    ALL = "all"


async def render(
    service: Service, version: str, *, openmetrics: bool = False, layers: Layers = Layers.TOP
) -> bytes:
    """All metrics.

    Args:
        openmetrics: in the OpenMetrics format, else in Prometheus's own text format.
    """
    timer, parts = service.timer, []
    turn = timer()
    for part in families(service, version, openmetrics=openmetrics, layers=layers):
        parts.append(part)
        if timer() - turn > TURN_S:
            await asyncio.sleep(0)
            turn = timer()
    return "".join(parts).encode()


def families(service: Service, version: str, *, openmetrics: bool, layers: Layers) -> Iterator[str]:
    """The text in parts: one for each family, or for a few dozen runs of a large one."""
    now = service.now()
    runs = [run for run in service.runs.runs.values() if exported(run, now)]
    for spec in CATALOG:
        if spec.reserved:
            continue
        head = _head(spec, openmetrics)
        if not spec.per_run:
            lines = list(_of_sidecar(spec, service, now, version))
            if lines:
                yield head + "\n".join(lines) + "\n"
            continue
        of_run = _renderer(spec, layers, exemplars=openmetrics)
        begun = False
        for at in range(0, len(runs), 32):
            body = "".join([of_run(run, now) for run in runs[at : at + 32]])
            if body:
                yield body if begun else head + body
                begun = True
    if openmetrics:
        yield "# EOF\n"


def exported(run: Run, now: float) -> bool:
    """Whether a run still has series."""
    if run.ended is None or run.run_state == "running":
        return True
    return now - run.ended <= (LOST_S if run.run_state == "lost" else ENDED_S)


def _head(spec: MetricSpec, openmetrics: bool) -> str:
    family = spec.full_name
    if openmetrics and spec.kind is Kind.COUNTER:
        family = family.removesuffix("_total")
    head = f"# HELP {family} {spec.help}\n# TYPE {family} {spec.kind}\n"
    return head + f"# UNIT {family} {spec.unit}\n" if openmetrics and spec.unit else head


def _of_sidecar(spec: MetricSpec, service: Service, now: float, version: str) -> Iterator[str]:
    if spec.name == "build_info":
        yield f"{spec.full_name}{labels(spec.labels, (version,))} 1.0"
    elif spec.kind is Kind.HISTOGRAM:
        for values, histogram in SIDECAR_HISTOGRAMS[spec.name](service):
            yield from _histogram(spec, spec.labels, values, histogram)
    else:
        for values, value in SIDECAR[spec.name](service, now):
            if value is not None:
                yield f"{spec.full_name}{labels(spec.labels, values)} {number(value)}"


def _renderer(spec: MetricSpec, layers: Layers, *, exemplars: bool) -> Callable[[Run, float], str]:
    """How the lines of one run are made."""
    name, label_names = spec.full_name, ("run", *spec.labels)
    if spec.name in SIGNALS:
        return lambda run, now: _layer_lines(name, spec.name, run, layers)
    if spec.name == "layers_left_out":
        return lambda run, now: (
            f"{_prefix(run, name, label_names, ())}{number(_left_out(run, layers))}\n"
        )
    if spec.kind is Kind.HISTOGRAM:
        durations = HISTOGRAMS[spec.name]
        return lambda run, now: _histogram_lines(spec, run, durations(run))
    source = SOURCES[spec.name]
    if exemplars and spec.name in FIELDS:

        def pointing(run: Run, now: float) -> str:
            return "".join(
                f"{_prefix(run, name, label_names, values)}{number(value)}"
                f"{run.figures.exemplars.of(spec.name, values)}\n"
                for values, value in source(run, now)
                if value is not None
            )

        return pointing

    def lines(run: Run, now: float) -> str:
        text, known = "", run.lines
        for values, value in source(run, now):
            if value is None:
                continue
            prefix = known.get((name, values)) or _prefix(run, name, label_names, values)
            # repr is right for whatever is finite, and most is.
            text += (
                f"{prefix}{value!r}\n" if value - value == 0.0 else prefix + number(value) + "\n"
            )
        return text

    return lines


def _prefix(run: Run, name: str, label_names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """A line up to its number, laid out once."""
    key = (name, values)
    found = run.lines.get(key)
    if found is None:
        if len(run.lines) > MOST_LINES:
            run.lines.clear()
        found = f"{name}{labels(label_names, (run.name, *values))} "
        run.lines[key] = found
    return found


MOST_LINES = 10_000


def _histogram_lines(spec: MetricSpec, run: Run, histogram: Histogram) -> str:
    """The same as _histogram, laid out once."""
    key = (spec.full_name, "histogram")
    pattern = run.lines.get(key)
    if pattern is None:
        empty = _histogram(spec, ("run",), (run.name,), Histogram(histogram.bounds))
        lines = [line.rpartition(" ")[0].replace("%", "%%") for line in empty]
        pattern = run.lines[key] = "".join([f"{line} %r\n" for line in lines])
    under, values = 0, []
    for count in histogram.counts or [0] * len(spec.buckets):
        under += count
        values.append(float(under))
    return pattern % (*values, float(histogram.count), histogram.total, float(histogram.count))


def _histogram(
    spec: MetricSpec, names: tuple[str, ...], values: tuple[str, ...], histogram: Histogram
) -> Iterator[str]:
    name, under = spec.full_name, 0
    given = labels(names, values)
    open_ = given[:-1] + "," if given else "{"
    for bound, count in zip(spec.buckets, histogram.counts or [0] * len(spec.buckets), strict=True):
        under += count
        yield f'{name}_bucket{open_}le="{number(bound)}"}} {number(under)}'
    yield f'{name}_bucket{open_}le="+Inf"}} {number(histogram.count)}'
    yield f"{name}_sum{given} {number(histogram.total)}"
    yield f"{name}_count{given} {number(histogram.count)}"


# ---- layers ------------------------------------------------------------------------------


def _layer_lines(name: str, column: str, run: Run, layers: Layers) -> str:
    values = run.figures.columns.get(column)
    if values is None:
        return ""
    chosen = _chosen(run, column, values, layers)
    picked = values[chosen]
    key = (name, chosen.tobytes())
    pattern = run.lines.get(key)
    if pattern is None:
        if len(run.lines) > MOST_LINES:
            run.lines.clear()
        table = [run.layers[at].name for at in chosen.tolist()]
        each = [f"{name}{labels(('run', 'layer'), (run.name, one))} " for one in table]
        pattern = "".join([line.replace("%", "%%") + "%.7g\n" for line in each])
        run.lines[key] = pattern
    found = picked.tolist()
    # By their places, where a nan is both extremes: isfinite().all() takes four times as long.
    if found and -math.inf < found[picked.argmin()] and found[picked.argmax()] < math.inf:
        return pattern % tuple(found)
    lines = pattern.split("\n")
    return "".join(
        [
            line.removesuffix("%.7g").replace("%%", "%") + _short(value) + "\n"
            for line, value in zip(lines, found, strict=False)
            if value != NOT_MEASURED
        ]
    )


def _short(value: float) -> str:
    return "%.7g" % value if math.isfinite(value) else number(value)  # noqa: UP031 (as the pattern)


def _chosen(run: Run, column: str, values: Column, layers: Layers) -> npt.NDArray[np.intp]:
    """Which layers have series: the largest, and those that were it a scrape ago."""
    count = min(len(values), len(run.layers))
    most = run.max_layers if layers is Layers.ALL else min(TOP, run.max_layers)
    if count <= most:
        return np.arange(count)
    if layers is Layers.ALL:
        return np.arange(most)
    size = np.abs(values[:count].astype(np.float64))
    size[values[:count] == NOT_MEASURED] = -1.0
    size[np.isnan(size)] = np.inf
    kept = run.top.get(column)
    if kept is None or len(kept) != most or int(kept.max()) >= count:
        kept = np.sort(np.argpartition(size, -most)[-most:])
    else:
        others = np.argpartition(size, -most)[-most:]
        others = others[~np.isin(others, kept)]
        for other in others[np.argsort(size[others])[::-1]]:
            weakest = int(np.argmin(size[kept]))
            if not size[other] > STICKY * max(float(size[kept[weakest]]), 0.0):
                break
            kept = kept.copy()
            kept[weakest] = other
        kept = np.sort(kept)
    run.top[column] = kept
    return kept


def _left_out(run: Run, layers: Layers) -> float:
    most = run.max_layers if layers is Layers.ALL else min(TOP, run.max_layers)
    return float(max(len(run.layers) - most, 0))


def _quantiles(run: Run, now: float) -> Iterable[Sample]:
    if len(run.layers) <= TOP:
        return
    for name in SIGNALS:
        values = run.figures.columns.get(name)
        if values is None:
            continue
        finite = np.sort(values[np.isfinite(values)])
        if len(finite):
            for quantile in QUANTILES:
                at = round(quantile * (len(finite) - 1))
                yield (name, f"{quantile:g}"), float(finite[at])


# ---- where each metric comes from: the sidecar's own view, beside core.exposition's ------


def _incidents(run: Run, now: float) -> Iterable[Sample]:
    if run.state is None:
        return ()
    silenced = {key for key, until in run.silenced.items() if until > now}
    open_ = Counter(
        (
            "silenced"
            if (i.number, i.opened) in silenced and i.state is not IncidentState.RESOLVED
            else str(i.state),
            str(i.severity),
        )
        for i in run.state.ledger.incidents
    )
    return [(key, float(count)) for key, count in sorted(open_.items())]


def _steps(run: Run, now: float) -> Iterable[Sample]:
    return one(run.kept.seen.count if run.state is None else run.state.ledger.counters.steps)


def _skipped(run: Run, now: float) -> Iterable[Sample]:
    if run.state is None:
        return table(sorted(run.figures.own.items()))
    return table(run.state.ledger.counters.skipped)


SOURCES: dict[str, Source] = {
    **exposition.SOURCES,
    "incidents": _incidents,
    "steps_total": _steps,
    "skipped_steps_total": _skipped,
    "report_interval_seconds": lambda run, now: one(run.interval_s),
    "layer_quantile": _quantiles,
    "decisions_total": lambda run, now: table(sorted(run.figures.decided.items())),
    "decision_misses_total": lambda run, now: table(sorted(run.figures.counts.misses.items())),
    "decision_mismatches_total": lambda run, now: one(run.figures.counts.mismatches),
    "reports_dropped_total": lambda run, now: (
        (("buffer_full",), float(run.figures.counts.dropped)),
        (("refused",), float(run.figures.rejected)),
    ),
    "report_holes": lambda run, now: one(None if run.unread else run.kept.seen.missing),
    "second_writers_refused": lambda run, now: one(len(run.refused)),
    "reports_late_total": lambda run, now: one(run.figures.late_reports),
    "state_handovers_total": lambda run, now: one(run.figures.handovers),
    "internal_errors_total": lambda run, now: [
        *table((f"sidecar_{where}", count) for where, count in sorted(run.figures.errors.items())),
        *table(sorted(run.figures.counts.internal_errors.items())),
    ],
    "decision_longest_wait_seconds": lambda run, now: one(run.figures.counts.longest_wait_s),
}
HISTOGRAMS: dict[str, Callable[[Run], Histogram]] = {
    "decision_duration_seconds": lambda run: run.figures.duration,
}


# ---- the sidecar itself ------------------------------------------------------------------


def _kept(get: Callable[[Keeper], Iterable[Sample]]) -> SidecarSource:
    """Of whoever keeps Grafana; nothing where nobody does."""

    def source(service: Service, now: float) -> Iterable[Sample]:
        grafana = service.settings.grafana
        return () if grafana is None or grafana.keeper is None else get(grafana.keeper)

    return source


def _checked(service: Service) -> Iterable[Sample]:
    found = {} if service.verifier is None else service.verifier.found
    return [
        ((run, str(result)), float(sum(one.result is result for one in known.values())))
        for run, known in sorted(found.items())
        if known
        for result in Result
    ]


def _annotated(get: Callable[[Writer], Iterable[Sample]]) -> SidecarSource:
    def source(service: Service, now: float) -> Iterable[Sample]:
        grafana = service.settings.grafana
        return () if grafana is None else get(grafana.writer)

    return source


SIDECAR: dict[str, SidecarSource] = {
    "sidecar_runs": lambda service, now: [
        *(
            ((state,), float(sum(run.run_state == state for run in service.runs.runs.values())))
            for state in RUN_STATES
        ),
        (("stored",), float(len(service.runs.stored))),  # on disk only: they made room
    ],
    "sidecar_requests_total": lambda service, now: [
        (key, float(count)) for key, count in sorted(service.health.requests.items())
    ],
    "sidecar_loop_lag_window_max_seconds": lambda service, now: one(service.health.lag.value(now)),
    "sidecar_listeners": lambda service, now: one(len(service.hub.listeners)),
    "sidecar_database_queue": lambda service, now: one(service.store.database.waiting),
    "sidecar_database_errors_total": lambda service, now: one(service.store.database.failed),
    "sidecar_database_lost_total": lambda service, now: one(service.store.database.dropped),
    "sidecar_store_trouble": lambda service, now: one(bool(service.store.trouble)),
    "sidecar_store_bytes": lambda service, now: one(service.store.bytes),
    "sidecar_lost_records_total": lambda service, now: one(service.store.lost_records),
    "sidecar_dropped_segments_total": lambda service, now: one(service.store.dropped_segments),
    "sidecar_snapshots_checked": lambda service, now: _checked(service),
    "sidecar_verified_bytes_total": lambda service, now: one(
        None if service.verifier is None else service.verifier.read_bytes
    ),
    "sidecar_grafana_up": _kept(lambda keeper: one(keeper.up)),
    "sidecar_grafana_left_alone": _kept(
        lambda keeper: [
            ((why,), float(sum(one == why for one in keeper.left_alone.values())))
            for why in ("edited", "newer", "files")
        ]
    ),
    "sidecar_grafana_writes_total": _kept(lambda keeper: one(keeper.writes)),
    "sidecar_grafana_failures_total": _kept(lambda keeper: table(sorted(keeper.failures.items()))),
    "sidecar_annotations_total": _annotated(
        lambda writer: table([("dropped", writer.dropped), ("written", writer.written)])
    ),
    "sidecar_annotations_waiting": _annotated(lambda writer: one(writer.waiting)),
    "sidecar_token_trouble": lambda service, now: one(bool(service.tokens.trouble)),
    "sidecar_job_errors_total": lambda service, now: table(
        sorted(service.health.job_errors.items())
    ),
}
SIDECAR_HISTOGRAMS: dict[str, Callable[[Service], Iterable[tuple[tuple[str, ...], Histogram]]]] = {
    "sidecar_request_duration_seconds": lambda service: [
        ((route,), histogram)
        for route, histogram in service.health.durations.items()
        if histogram.count
    ],
}
