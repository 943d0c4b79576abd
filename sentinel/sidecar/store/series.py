"""Series for people: a run's curves and layer maps, thinned so that no spike is lost.

    series = SeriesFiles(cache_directory)
    series.curves(run_directory, ("loss", "grad_norm"), first, last, points=1500)
    series.layers(run_directory, "layer_grad_norm", first, last, points=300)

Works on any directory in the trace format: a sidecar's own record and an embedded run's trace.
Curves come from the index at the end of each closed segment (38 bytes a step); of what is still
open, every record is read. Each of the buckets keeps its lowest and its highest finite value and
its first non-finite one, at their own steps. Layer maps keep the maximum of each bucket; of a
closed segment the maxima of every 64 steps are kept in `cache_directory`, so that a long run's map
is drawn without reading its layers again.

Rows are in the order of their incarnations, within one by step: late reports are where they belong.

Shapes:  columns [N] a row each; maps [L, B] a layer and a bucket.
Threads: any number of readers; the caches are behind a lock.
Errors:  TraceError where a file cannot be read; QueryError for a question that makes no sense.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.core.errors import ProtocolError
from sentinel.core.types import NOT_MEASURED, Action
from sentinel.traces.reader import index_of
from sentinel.traces.recorder import list_incarnations
from sentinel.traces.records import (
    HAS_LOSS,
    HAS_NORM,
    INDEX_DTYPE,
    UNKNOWN_ACTION,
    columns_key,
    decode_columns,
    decode_header,
    decode_step,
)
from sentinel.traces.segments import (
    LAYERS,
    SCALARS,
    Kind,
    list_segments,
    read_header,
    read_segment,
)
from sentinel.traces.summary import read_index

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CURVES = ("loss", "grad_norm", "lr", "attempt", "action")  # in the index: any range
DECODED = ("spike_score", "norm_baseline", "lr_factor", "loss_scale")  # in the records
LAYER_COLUMNS = re.compile(r"layer_[a-z_]{1,48}")
MOST_POINTS = 20_000
MOST_DECODED = 20_000  # rows
MOST_ACTIONS = 2_000
BUCKET = 64
KEPT_PARSED = 256  # open segments whose index is kept
KEPT_MAPS = 64
KEPT_VALUES = 32
_HAS_LR = 4
_ACTIONS = {int(action): action.name.lower() for action in Action}


class QueryError(ProtocolError):
    """A question that makes no sense, or is too large to be answered at once."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Steps in order: the index, and which incarnation each is of."""

    index_N: npt.NDArray[np.void]
    incarnation_N: Ints
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.index_N)


@dataclass(frozen=True, slots=True)
class _Maxima:
    """Maxima of every BUCKET records of a layers segment; -inf where nothing was measured."""

    first_B: Ints
    last_B: Ints
    columns: dict[str, npt.NDArray[np.float32]]  # [B, L]


class SeriesFiles:
    """See the module docstring."""

    def __init__(self, cache: Path | None) -> None:
        """`cache`: where maxima of closed layer segments are kept; None: in memory only."""
        self._cache = cache
        self._lock = threading.Lock()
        self._parsed: OrderedDict[Path, tuple[int, bytes, dict[int, int]]] = OrderedDict()
        self._values: OrderedDict[Path, tuple[int, list[tuple[int, int]], Floats]] = OrderedDict()
        self._maxima: OrderedDict[Path, tuple[int, _Maxima]] = OrderedDict()

    # ---- curves ----------------------------------------------------------------------------

    def rows(self, directory: Path) -> Rows:
        """All steps of a run."""
        parts: list[npt.NDArray[np.void]] = []
        whose: list[Ints] = []
        groups = _groups(directory)
        for number, places in enumerate(groups.values()):
            own, foreign = [], {}
            for place in places:
                for _, path in list_segments(place, SCALARS):
                    index, corrected = self._index(path)
                    own.append(np.frombuffer(index, INDEX_DTYPE))
                    foreign.update(corrected)
            rows_N = np.concatenate(own) if own else np.empty(0, INDEX_DTYPE)
            if foreign:
                rows_N = rows_N.copy()
                for step, action in foreign.items():
                    rows_N["executed"][rows_N["step"] == step] = action
            step_N = rows_N["step"]
            if len(step_N) > 1 and bool(np.any(step_N[1:] < step_N[:-1])):
                rows_N = rows_N[np.argsort(step_N, kind="stable")]
            parts.append(rows_N)
            whose.append(np.full(len(rows_N), number, np.int64))
        if not parts:
            return Rows(np.empty(0, INDEX_DTYPE), np.empty(0, np.int64), ())
        return Rows(np.concatenate(parts), np.concatenate(whose), tuple(groups))

    def curves(
        self,
        directory: Path,
        names: Sequence[str],
        first: int | None,
        last: int | None,
        points: int,
    ) -> dict[str, Any]:
        """Curves of the steps `first` to `last`, both included; None: from or to the end.

        Args:
            points: about so many for each name; all rows when there are no more.

        Raises:
            QueryError: a name that is none, or too many rows for one that must be decoded.
        """
        for name in names:
            if name not in CURVES and name not in DECODED:
                known = ", ".join((*CURVES, *DECODED))
                raise QueryError(f"name must be among {known}, got {name!r}")
        if not 1 <= points <= MOST_POINTS:
            raise QueryError(f"points must lie between 1 and {MOST_POINTS}, got {points}")
        rows = self.rows(directory)
        chosen_N = _between(rows.index_N["step"], first, last)
        index_N = rows.index_N[chosen_N]
        whose_N = rows.incarnation_N[chosen_N]
        decoded = [name for name in names if name in DECODED]
        extra: dict[str, tuple[Floats, npt.NDArray[np.bool_]]] = {}
        if decoded:
            if len(index_N) > MOST_DECODED:
                raise QueryError(
                    f"{', '.join(decoded)} can be had for {MOST_DECODED} steps at once, "
                    f"{len(index_N)} were asked for; narrow from and to"
                )
            extra = self._decoded(directory, index_N, decoded)
        step_N = index_N["step"].astype(np.int64)
        thinned = len(index_N) > points
        series = {}
        for name in names:
            if name in extra:
                value_N, there_N = extra[name]
            else:
                value_N, there_N = _column(index_N, name)
            at = _thin(value_N, there_N, points) if thinned else np.arange(len(step_N))
            values = _values(name, value_N[at], there_N[at])
            series[name] = {"step": step_N[at].tolist(), "value": values}
        return {
            "from": int(step_N[0]) if len(step_N) else None,
            "to": int(step_N.max()) if len(step_N) else None,
            "rows": len(index_N),
            "downsampled": thinned,
            "series": series,
            "incarnations": _lives(rows.names, whose_N, step_N),
            **_acted(index_N),
        }

    def _index(self, path: Path) -> tuple[bytes, dict[int, int]]:
        index = read_index(path)
        if index is not None:
            return index, {}
        size = path.stat().st_size
        with self._lock:
            known = self._parsed.get(path)
        if known is not None and known[0] == size:
            return known[1], known[2]
        index, foreign = index_of(read_segment(path).frames)
        with self._lock:
            self._parsed[path] = (size, index, foreign)
            self._parsed.move_to_end(path)
            while len(self._parsed) > KEPT_PARSED:
                self._parsed.popitem(last=False)
        return index, foreign

    def _decoded(
        self, directory: Path, index_N: npt.NDArray[np.void], names: Sequence[str]
    ) -> dict[str, tuple[Floats, npt.NDArray[np.bool_]]]:
        """Values that stand in the records themselves, in the order of the rows."""
        wanted = {(int(s), int(a)): at for at, (s, a) in enumerate(_keys(index_N))}
        values = {name: np.full(len(index_N), np.nan) for name in names}
        there = {name: np.zeros(len(index_N), np.bool_) for name in names}
        low, high = (int(index_N["step"].min()), int(index_N["step"].max())) if wanted else (0, -1)
        for places in _groups(directory).values():
            for place in places:
                for _, path in list_segments(place, SCALARS):
                    steps = np.frombuffer(self._index(path)[0], INDEX_DTYPE)["step"]
                    if not len(steps) or steps.max() < low or steps.min() > high:
                        continue
                    keys, table_NK = self._values_of(path)
                    for row, key in enumerate(keys):
                        at = wanted.get(key)
                        if at is None:
                            continue
                        for name in names:
                            value = table_NK[row, DECODED.index(name)]
                            if value != NOT_MEASURED:
                                values[name][at], there[name][at] = value, True
        return {name: (values[name], there[name]) for name in names}

    def _values_of(self, path: Path) -> tuple[list[tuple[int, int]], Floats]:
        """What DECODED names of each step of a segment, -inf where there is nothing."""
        size = path.stat().st_size
        with self._lock:
            known = self._values.get(path)
        if known is not None and known[0] == size:
            return known[1], known[2]
        keys: list[tuple[int, int]] = []
        rows: list[list[float]] = []
        for frame in read_segment(path).frames:
            if frame.kind is not Kind.STEP:
                continue
            record = decode_step(frame.payload, str(path))
            decision = record.decision if record.decision_bytes else None
            found: list[float | None] = [None, None, None, record.observation.loss_scale]
            if decision is not None:
                readings = decision.readings
                found[:3] = [readings.spike_score, readings.norm_baseline, decision.lr_factor]
            keys.append((record.step, record.attempt))
            rows.append([NOT_MEASURED if value is None else value for value in found])
        table_NK = np.asarray(rows, np.float64).reshape(-1, len(DECODED))
        with self._lock:
            self._values[path] = (size, keys, table_NK)
            self._values.move_to_end(path)
            while len(self._values) > KEPT_VALUES:
                self._values.popitem(last=False)
        return keys, table_NK

    # ---- layers ----------------------------------------------------------------------------

    def layers(
        self,
        directory: Path,
        name: str,
        first: int | None,
        last: int | None,
        points: int,
    ) -> dict[str, Any]:
        """A map of layers by steps: the maximum of each bucket.

        Raises:
            QueryError: a name that is none.
        """
        if not LAYER_COLUMNS.fullmatch(name):
            raise QueryError(f"name must be a per-layer column, such as layer_grad_norm: {name!r}")
        if not 1 <= points <= 2_000:
            raise QueryError(f"points must lie between 1 and 2000, got {points}")
        first, last = self._ends(directory, first, last)
        table: list[str] = []
        stretches: list[tuple[Ints, Ints, npt.NDArray[np.float32]]] = []
        for places in _groups(directory).values():
            for place in places:
                names = _layer_names(place)
                before, stretches = stretches, []
                for _, path in list_segments(place, LAYERS):
                    found = self._stretch(path, name, first, last, points)
                    if found is not None:
                        stretches.append(found)
                if names and names != table and (stretches or not before):
                    table, before = names, []  # another model: the same row is another layer there
                stretches = before + stretches
        width = max((values.shape[1] for _, _, values in stretches), default=len(table))
        stretches = [s for s in stretches if s[2].shape[1] == width]
        names = table[:width] + [f"layer {at}" for at in range(len(table), width)]
        if not stretches:
            return {"name": name, "layers": names, "rows": 0, "steps": [], "last": [], "values": []}
        first_N = np.concatenate([s[0] for s in stretches])
        last_N = np.concatenate([s[1] for s in stretches])
        values_NL = np.concatenate([s[2] for s in stretches])
        if bool(np.any(first_N[1:] < first_N[:-1])):
            order = np.argsort(first_N, kind="stable")
            first_N, last_N, values_NL = first_N[order], last_N[order], values_NL[order]
        starts = np.unique(np.linspace(0, len(first_N), points + 1).astype(np.int64)[:-1])
        ends = np.append(starts[1:], len(first_N))
        most_BL = _maximum(values_NL, starts)
        return {
            "name": name,
            "layers": names,
            "rows": len(first_N),
            "steps": first_N[starts].tolist(),
            "last": np.maximum.reduceat(last_N, starts).tolist() if len(ends) else [],
            "values": _words(np.ascontiguousarray(most_BL.T)),
        }

    def prepare(self, directory: Path, most: int = 8) -> int:
        """Make up to `most` missing maxima of closed segments; returns how many were made."""
        made = 0
        for places in _groups(directory).values():
            for place in places:
                for _, path in list_segments(place, LAYERS)[:-1]:
                    if made >= most:
                        return made
                    if not self._cached(path).exists():
                        self._maxima_of(path)
                        made += 1
        return made

    def _ends(
        self, directory: Path, first: int | None, last: int | None
    ) -> tuple[int | None, int | None]:
        """An end that was not given is the run's own: short runs are shown step by step then."""
        if first is not None and last is not None:
            return first, last
        firsts, lasts = [], []
        for place in list_incarnations(directory):
            paths = [path for _, path in list_segments(place, LAYERS)]
            for path in paths[:1] + paths[-1:]:
                maxima = self._maxima_of(path)
                if len(maxima.first_B):
                    firsts.append(int(maxima.first_B[0]))
                    lasts.append(int(maxima.last_B[-1]))
        return (
            min(firsts, default=None) if first is None else first,
            max(lasts, default=None) if last is None else last,
        )

    def _stretch(
        self, path: Path, name: str, first: int | None, last: int | None, points: int
    ) -> tuple[Ints, Ints, npt.NDArray[np.float32]] | None:
        maxima = self._maxima_of(path)
        values = maxima.columns.get(name)
        if values is None:
            return None
        chosen = np.ones(len(maxima.first_B), np.bool_)
        if first is not None:
            chosen &= maxima.last_B >= first
        if last is not None:
            chosen &= maxima.first_B <= last
        if not chosen.any():
            return None
        span = None if first is None or last is None else last - first + 1
        if span is None or span > points * BUCKET // 4:
            return maxima.first_B[chosen], maxima.last_B[chosen], values[chosen]
        step_N, values_NL = _read_column(path, name, first, last)
        if not len(step_N):
            return None
        return step_N, step_N, values_NL

    def _cached(self, path: Path) -> Path:
        assert self._cache is not None
        return self._cache / path.parent.parent.name / path.parent.name / f"{path.stem}.npz"

    def _maxima_of(self, path: Path) -> _Maxima:
        size = path.stat().st_size
        with self._lock:
            known = self._maxima.get(path)
        if known is not None and known[0] == size:
            return known[1]
        closed = path != list_segments(path.parent, LAYERS)[-1][1]
        found = self._load(path) if closed and self._cache is not None else None
        if found is None:
            found = _maxima(path)
            if closed and self._cache is not None:
                self._save(path, found)
        with self._lock:
            self._maxima[path] = (size, found)
            self._maxima.move_to_end(path)
            while len(self._maxima) > KEPT_MAPS:
                self._maxima.popitem(last=False)
        return found

    def _load(self, path: Path) -> _Maxima | None:
        try:
            with np.load(self._cached(path), allow_pickle=False) as data:
                columns = {name[2:]: data[name] for name in data.files if name.startswith("c.")}
                return _Maxima(data["first"], data["last"], columns)
        except (OSError, ValueError, KeyError, EOFError):
            return None

    def _save(self, path: Path, maxima: _Maxima) -> None:
        place = self._cached(path)
        columns: dict[str, Any] = {f"c.{name}": value for name, value in maxima.columns.items()}
        unfinished = place.with_suffix(f".{threading.get_ident()}.tmp")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                np.savez(file, first=maxima.first_B, last=maxima.last_B, **columns)
            os.replace(unfinished, place)
        except OSError:
            unfinished.unlink(missing_ok=True)  # a cache; the next question computes it again


def _groups(directory: Path) -> dict[str, list[Path]]:
    """The directories of each incarnation, in the order in which they began."""
    groups: dict[str, list[Path]] = {}
    for place in list_incarnations(directory):
        groups.setdefault(place.name.partition("-")[2], []).append(place)
    return groups


def _between(step_N: Ints, first: int | None, last: int | None) -> npt.NDArray[np.bool_]:
    chosen_N = np.ones(len(step_N), np.bool_)
    if first is not None:
        chosen_N &= step_N >= first
    if last is not None:
        chosen_N &= step_N <= last
    return chosen_N


def _keys(index_N: npt.NDArray[np.void]) -> list[tuple[int, int]]:
    return list(zip(index_N["step"].tolist(), index_N["attempt"].tolist(), strict=True))


def _column(
    index_N: npt.NDArray[np.void], name: str
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """A column of the index, and where it was measured."""
    if name == "action":
        value_N = index_N["executed"].astype(np.float64)
        return value_N, index_N["executed"] != UNKNOWN_ACTION
    if name == "attempt":
        return index_N["attempt"].astype(np.float64), np.ones(len(index_N), np.bool_)
    bit = {"loss": HAS_LOSS, "grad_norm": HAS_NORM, "lr": _HAS_LR}[name]
    return index_N[name].astype(np.float64), (index_N["present"] & bit) != 0


def _thin(value_N: Floats, there_N: npt.NDArray[np.bool_], points: int) -> Ints:
    """Which rows to keep: of each bucket the lowest, the highest, the first non-finite one."""
    finite_N = there_N & np.isfinite(value_N)
    odd_N = there_N & ~finite_N
    buckets = max(points // (3 if odd_N.any() else 2), 1)
    starts = np.unique(np.linspace(0, len(value_N), buckets + 1).astype(np.int64)[:-1])
    bucket_N = np.zeros(len(value_N), np.int64)
    bucket_N[starts[1:]] = 1
    bucket_N = np.cumsum(bucket_N)
    low_B = np.minimum.reduceat(np.where(finite_N, value_N, np.inf), starts)
    high_B = np.maximum.reduceat(np.where(finite_N, value_N, -np.inf), starts)
    keep = [
        _firsts(finite_N & (value_N == low_B[bucket_N]), bucket_N),
        _firsts(finite_N & (value_N == high_B[bucket_N]), bucket_N),
        _firsts(odd_N, bucket_N),
    ]
    kept: Ints = np.unique(np.concatenate(keep))
    return kept


def _firsts(chosen_N: npt.NDArray[np.bool_], bucket_N: Ints) -> Ints:
    """The first chosen row of each bucket that has one."""
    rows = np.flatnonzero(chosen_N)
    if not len(rows):
        return rows
    bucket = bucket_N[rows]
    kept: Ints = rows[np.append(True, bucket[1:] != bucket[:-1])]
    return kept


def _values(name: str, value: Floats, there: npt.NDArray[np.bool_]) -> list[Any]:
    """What JSON shows: null where nothing was measured, words where it was no number."""
    if name == "action":
        known = zip(value.tolist(), there.tolist(), strict=True)
        return [_ACTIONS.get(int(v), "") if t else None for v, t in known]
    if name == "attempt":
        return [int(v) for v in value.tolist()]
    values: list[Any] = value.tolist()
    for at in np.flatnonzero(~np.isfinite(value) | ~there).tolist():
        values[at] = _word(values[at]) if there[at] else None
    return values


def _word(value: float) -> str:
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def _lives(names: Sequence[str], whose_N: Ints, step_N: Ints) -> list[dict[str, Any]]:
    found = []
    for number, name in enumerate(names):
        own = step_N[whose_N == number]
        if len(own):
            found.append({"incarnation": name, "first": int(own[0]), "last": int(own[-1])})
    return found


def _acted(index_N: npt.NDArray[np.void]) -> dict[str, Any]:
    """Steps that were not let through, the newest ones, and how many there are."""
    executed_N = index_N["executed"]
    at = np.flatnonzero((executed_N != Action.PROCEED) & (executed_N != UNKNOWN_ACTION))
    shown = index_N[at[-MOST_ACTIONS:]]
    return {
        "actions": [
            {"step": step, "attempt": attempt, "action": _ACTIONS.get(action, "")}
            for step, attempt, action in zip(
                shown["step"].tolist(),
                shown["attempt"].tolist(),
                shown["executed"].tolist(),
                strict=True,
            )
        ],
        "actions_total": len(at),
    }


def _layer_names(place: Path) -> list[str]:
    """The layer table of an incarnation, from its newest header that can be read."""
    for _, path in reversed(list_segments(place, SCALARS)):
        payload = read_header(path)
        if payload is None:
            continue
        table = decode_header(payload, str(path)).layers
        return [str(row.get("name", "") if isinstance(row, dict) else _first(row)) for row in table]
    return []


def _first(row: Any) -> Any:
    return row[0] if isinstance(row, list | tuple) and row else row


def _read_column(
    path: Path, name: str, first: int | None, last: int | None
) -> tuple[Ints, npt.NDArray[np.float32]]:
    steps: list[int] = []
    rows: list[npt.NDArray[np.float32]] = []
    for frame in read_segment(path).frames:
        if frame.kind is not Kind.COLUMNS:
            continue
        step, _ = columns_key(frame.payload)
        if (first is not None and step < first) or (last is not None and step > last):
            continue
        column = decode_columns(frame.payload, str(path)).get(name)
        if column is not None and (not rows or len(rows[0]) == len(column)):
            steps.append(step)
            rows.append(column)
    empty = np.empty((0, 0), np.float32)
    return np.asarray(steps, np.int64), np.stack(rows) if rows else empty


def _maxima(path: Path) -> _Maxima:
    """The maxima of every BUCKET records of one layers segment."""
    steps: list[int] = []
    columns: dict[str, list[tuple[int, npt.NDArray[np.float32]]]] = {}
    for frame in read_segment(path).frames:
        if frame.kind is not Kind.COLUMNS:
            continue
        step, _ = columns_key(frame.payload)
        for name, column in decode_columns(frame.payload, str(path)).items():
            columns.setdefault(name, []).append((len(steps), column))
        steps.append(step)
    step_N = np.asarray(steps, np.int64)
    starts = np.arange(0, len(steps), BUCKET)
    if not len(starts):
        return _Maxima(step_N, step_N, {})
    found = {}
    for name, rows in columns.items():
        width = len(rows[0][1])
        most = np.full((len(starts), width), -np.inf, np.float32)
        kept = [(at, row) for at, row in rows if len(row) == width]
        bucket = np.asarray([at // BUCKET for at, _ in kept])
        values = np.stack([row for _, row in kept])
        own = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1]))
        most[bucket[own]] = _maximum(values, own)
        found[name] = most
    first_B, last_B = np.minimum.reduceat(step_N, starts), np.maximum.reduceat(step_N, starts)
    return _Maxima(first_B, last_B, found)


def _maximum(values_NL: npt.NDArray[np.float32], starts: Ints) -> npt.NDArray[np.float32]:
    """The maximum of each stretch; nan and inf are what must not be lost, so they win."""
    most: npt.NDArray[np.float32] = np.maximum.reduceat(values_NL, starts, axis=0)
    return most  # np.maximum hands nan on, and inf is the largest anyway


def _words(values_LB: npt.NDArray[np.float32]) -> list[list[Any]]:
    """Rows for JSON, to 5 digits: null where nothing was measured, words where it was no number."""
    values = values_LB.astype(np.float64)
    finite = np.isfinite(values) & (values != 0.0)
    scale = np.ones_like(values)
    scale[finite] = 10.0 ** (4.0 - np.floor(np.log10(np.abs(values[finite]))))
    rounded = np.where(finite, np.round(values * scale) / scale, values)
    rows: list[list[Any]] = rounded.tolist()
    for row, at in np.argwhere(~np.isfinite(values)).tolist():
        value = rows[row][at]
        rows[row][at] = None if value == -np.inf else _word(value)
    return rows


def encode(value: dict[str, Any]) -> bytes:
    """An answer of this module as JSON; its numbers are finite or words already."""
    return msgspec.json.encode(value)
