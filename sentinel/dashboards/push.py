"""Bring a Grafana to what the catalogue says: compare first, write only what differs.

    plan = compare(port, wanted(...))     -> Plan: what is missing or differs, nothing written
    apply(port, plan)                     -> write it; a second time there is nothing to write

Grafana adds to what it stores (ids, versions, defaults inside a query's model), so that a thing
counts as equal when everything that is sent is there, at any depth; lists must have the same
length. A dashboard is written with the version that was read: who was faster in Grafana is not
overwritten, and the push says so.

Errors:  GrafanaError from the port; PushError when there is nothing to push, or no data source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sentinel.core.errors import SentinelError
from sentinel.dashboards import alerts
from sentinel.dashboards.seal import Owner, newer, seal, seal_of, unsealed, whose, whose_rules

SHOWN = 20  # differences of one thing that are listed
MESSAGE = "pushed by sentinel"
_WORDS = {
    Owner.EDITED: "changed by hand",
    Owner.NEWER: "by a later release",
    Owner.FILES: "read from files",
}
_BESIDE = Path(__file__).parent / "generated"  # in an installed wheel
_CHECKOUT = Path(__file__).parents[2] / "grafana" / "dashboards"


class PushError(SentinelError):
    """There is nothing to push, or it is not clear where to."""


class Grafana(Protocol):
    """What a push needs of dashboards.grafana.GrafanaPort."""

    def folder(self, uid: str) -> dict[str, Any] | None: ...
    def create_folder(self, uid: str, title: str) -> None: ...
    def dashboard(self, uid: str) -> dict[str, Any] | None: ...
    def save_dashboard(self, dashboard: dict[str, Any], folder: str, message: str) -> int: ...
    def rule_group(self, folder: str, name: str) -> dict[str, Any] | None: ...
    def put_rule_group(self, group: dict[str, Any]) -> None: ...
    def prometheus_sources(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What Grafana shall hold; `group` None: leave alert rules alone."""

    folder: str
    dashboards: tuple[dict[str, Any], ...]
    group: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to write.

    Attributes:
        what: "folder", "dashboard" or "alert rules".
        name: its uid or title.
        differences: paths in it that differ; empty when it is missing altogether.
        body: what is sent.
        owner: who had the last word about what is there; a push overwrites it all the same.
    """

    what: str
    name: str
    differences: tuple[str, ...]
    body: dict[str, Any]
    owner: Owner = Owner.OURS

    def __str__(self) -> str:
        if not self.differences:
            return f"{self.what} {self.name}: is missing"
        more = len(self.differences) - SHOWN
        by = "" if self.owner is Owner.OURS else f" ({_WORDS[self.owner]})"
        lines = [f"{self.what} {self.name}: differs{by}", *self.differences[:SHOWN]]
        if more > 0:
            lines.append(f"and {more} more")
        return "\n    ".join(lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be written, in this order, and what is equal already."""

    changes: tuple[Change, ...]
    equal: tuple[str, ...]
    folder: str


def dashboards(folder: Path | None = None) -> tuple[dict[str, Any], ...]:
    """The generated dashboards.

    Args:
        folder: where the JSON lies; None: in the installed package, else in the checkout.

    Raises:
        PushError: none is there, or one cannot be read.
    """
    where = folder or (_BESIDE if _BESIDE.is_dir() else _CHECKOUT)
    found = []
    for path in sorted(where.glob("*.json")):
        try:
            board = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PushError(f"cannot read the dashboard {path}: {error}") from error
        if not isinstance(board, dict) or not board.get("uid"):
            raise PushError(f"{path} is not a dashboard: it has no uid")
        found.append(board)
    if not found:
        raise PushError(f"no dashboards in {where}; in a checkout: sentinel dashboards build")
    return tuple(found)


def wanted(
    boards: tuple[dict[str, Any], ...],
    *,
    folder: str = alerts.FOLDER,
    runbooks: str = "",
    datasource: str | None = alerts.DATASOURCE,
) -> Wanted:
    """What Grafana shall hold.

    Args:
        runbooks: where docs/operating.md is read; "" keeps what the files say.
        datasource: uid of the Prometheus data source for alert rules; None: no alert rules.
    """
    if runbooks:
        boards = tuple(_with_runbooks(board, runbooks) for board in boards)
    group = None
    if datasource is not None:
        group = alerts.grafana_group(folder, datasource, runbooks or alerts.RUNBOOKS)
    return Wanted(folder, boards, group)


def _with_runbooks(board: dict[str, Any], runbooks: str) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(board))
    for variable in copied.get("templating", {}).get("list", []):
        if variable.get("name") == "runbooks":
            variable["query"] = runbooks
    return copied


def only_source(port: Grafana) -> str:
    """The uid of the Prometheus data source, when there is exactly one.

    Raises:
        PushError: none or several.
    """
    found = port.prometheus_sources()
    if len(found) == 1:
        return found[0]
    seen = f"has several ({', '.join(sorted(found))})" if found else "has none"
    raise PushError(
        f"alert rules need one Prometheus data source, and this Grafana {seen}: "
        "say which with --datasource UID, or leave them out with --no-alerts"
    )


def compare(port: Grafana, want: Wanted) -> Plan:
    """What differs; writes nothing."""
    changes: list[Change] = []
    equal: list[str] = []
    later = False
    if port.folder(want.folder) is None:
        changes.append(Change("folder", want.folder, (), {}))
    else:
        equal.append(f"folder {want.folder}")
    for board in want.dashboards:
        uid = str(board["uid"])
        found = port.dashboard(uid)
        if found is None:
            changes.append(Change("dashboard", uid, (), {**seal(board, 1), "id": None}))
            continue
        there = found["dashboard"]
        mark = seal_of(there)
        later = later or (mark is not None and newer(mark.release))
        differs = tuple(differences(board, unsealed(there)))
        if found.get("meta", {}).get("folderUid", want.folder) != want.folder:
            differs = (*differs, f"folder: {found['meta']['folderUid']!r} -> {want.folder!r}")
        if differs:
            version = int(there.get("version") or 0)
            body = {**seal(board, version + 1), "id": there.get("id"), "version": version}
            changes.append(Change("dashboard", uid, differs, body, whose(found, want.folder)))
        else:
            equal.append(f"dashboard {uid}")
    if want.group is not None:
        name = str(want.group["title"])
        there = port.rule_group(want.folder, name)
        # Grafana answers an empty group for one that it does not have.
        if there is None or not there.get("rules"):
            owner = Owner.NEWER if later else Owner.OURS
            changes.append(Change("alert rules", name, (), want.group, owner))
        elif differs := tuple(differences(_by_name(want.group), _by_name(there))):
            # Rules carry no mark: the dashboards say whether a later release was here.
            owner = Owner.NEWER if later else whose_rules(there, want.group)
            changes.append(Change("alert rules", name, differs, want.group, owner))
        else:
            equal.append(f"alert rules {name}")
    return Plan(tuple(changes), tuple(equal), want.folder)


def apply(port: Grafana, plan: Plan) -> Iterator[Change]:
    """Write the changes one by one; yields each when it is done."""
    for change in plan.changes:
        match change.what:
            case "folder":
                port.create_folder(change.name, change.name)
            case "dashboard":
                port.save_dashboard(change.body, plan.folder, MESSAGE)
            case _:
                port.put_rule_group(change.body)
        yield change


def differences(want: Any, there: Any, path: str = "") -> Iterator[str]:
    """Where something that is wanted is not there, as path: there -> wanted."""
    if isinstance(want, dict) and isinstance(there, dict):
        for key, value in want.items():
            if key in ("id", "version") and not path:
                continue
            if value is None and key not in there:
                continue
            yield from differences(value, there.get(key), f"{path}.{key}" if path else key)
    elif isinstance(want, list) and isinstance(there, list) and len(want) == len(there):
        for number, (a, b) in enumerate(zip(want, there, strict=True)):
            yield from differences(a, b, f"{path}[{number}]")
    elif isinstance(want, int | float) and isinstance(there, int | float):
        if want != there:
            yield f"{path}: {there} -> {want}"
    elif want != there:
        yield f"{path}: {_short(there)} -> {_short(want)}"


def _by_name(group: dict[str, Any]) -> dict[str, Any]:
    """The group with its rules by uid: their order is Grafana's affair."""
    rules = {str(rule.get("uid")): rule for rule in group.get("rules", [])}
    count = len(group.get("rules", []))
    return {"interval": group.get("interval"), "rules": rules, "number of rules": count}


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
