"""`sentinel runs | status | incidents | audit`: what a sidecar knows, for a terminal at 3 a.m.

    sentinel runs                       every run in a line
    sentinel status [RUN]               without RUN the same, with it one run in full
    sentinel incidents [RUN] [--all]    what went wrong, what was done about it and why
    sentinel audit [RUN]                who asked for what

Exit:    0; 1 when the sidecar cannot be asked or does not know the run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sentinel.cli import words
from sentinel.cli.remote import Remote, RemoteError, add_options, run_path
from sentinel.cli.words import ago, number, steps, text

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parsers(subparsers: Subparsers) -> None:
    """Register the subcommands."""
    parser = subparsers.add_parser("runs", help="every run that a sidecar knows, in a line each")
    parser.add_argument(
        "--all", action="store_true", help="also those that are over and on disk only"
    )
    add_options(parser)
    parser.set_defaults(run=list_runs)

    parser = subparsers.add_parser("status", help="how the runs of a sidecar are")
    parser.add_argument("name", nargs="?", metavar="RUN", help="one run, in full")
    add_options(parser)
    parser.set_defaults(run=status)

    parser = subparsers.add_parser(
        "incidents", help="what went wrong, what was done about it and why"
    )
    parser.add_argument("name", nargs="?", metavar="RUN", help="of one run only")
    parser.add_argument("--all", action="store_true", help="also those that are over")
    add_options(parser)
    parser.set_defaults(run=list_incidents)

    parser = subparsers.add_parser("audit", help="who asked for what, and whether they got it")
    parser.add_argument("name", nargs="?", metavar="RUN", help="about one run only")
    parser.add_argument("--limit", type=_limit, default=50, help="lines, to 1000 (%(default)s)")
    add_options(parser)
    parser.set_defaults(run=audit)


def list_runs(options: argparse.Namespace) -> int:
    """Carry `sentinel runs` out."""
    every = getattr(options, "all", False)
    with Remote(options) as sidecar:
        data = sidecar.get("/v1/runs?all=1" if every else "/v1/runs")
    if options.json:
        return _print_json(data)
    if data.get("trouble"):
        print(f"! the sidecar's record is in trouble, runs may be missing: {text(data['trouble'])}")
    for name, why in (data.get("not_shown") or {}).items():
        print(f"! watched, but not shown: {text(name)}: {text(why)}")
    if not data["runs"]:
        print(_stored(data) or "no runs")
        return 0
    order = {"lost": 0, "halted": 1, "running": 2}
    found = sorted(data["runs"], key=lambda r: (order.get(r["state"], 3), r["run"]))
    rows = [
        (
            text(run["run"]),
            run["state"],
            _protection(run),
            steps(run["step"]),
            number(run["loss"]),
            number(run["grad_norm"]),
            _last_report(run),
            _remarks(run),
        )
        for run in found
    ]
    head = ("run", "state", "protection", "step", "loss", "norm", "last report", "")
    print(words.table(head, rows, right=(3, 4, 5)))
    if _stored(data) and not every:
        print(_stored(data))
    return 0


def _stored(data: dict[str, Any]) -> str:
    """Which runs are not among those; "" where none is lacking."""
    count = data.get("stored") or 0
    if not count:
        return ""
    return (
        f"{number(count)} more, which {'is' if count == 1 else 'are'} over, on disk only (serve "
        "--max-runs): sentinel runs --all, sentinel status RUN"
    )


DASH_NONE = "none yet"
ORDERS_SHOWN = 5


def status(options: argparse.Namespace) -> int:
    """Carry `sentinel status` out."""
    if not options.name:
        return list_runs(options)
    with Remote(options) as sidecar:
        run = sidecar.run(options.name)
        if options.json:
            return _print_json(run)
        run["incidents"] = _incidents(sidecar, run)
        run["targets"] = _targets(sidecar, run["run"], run["incidents"])
    print("\n".join(words.wrapped(_status(run))))
    return 0


def list_incidents(options: argparse.Namespace) -> int:
    """Carry `sentinel incidents` out."""
    with Remote(options) as sidecar:
        listed = [] if options.name else sidecar.get("/v1/runs")["runs"]
        # Of one that has none open, nothing is to be asked: there may be a thousand.
        asked = [r["run"] for r in listed if options.all or r.get("open_incidents") != 0]
        names = [options.name] if options.name else asked
        found: list[tuple[str, Any, list[str]]] = []
        targets: dict[str, dict[int, int]] = {}
        lacking: dict[str, str] = {}
        for name in names:
            run = sidecar.run(name)
            name = run["run"]  # the whole one, of one that began so
            incidents = _incidents(sidecar, run)
            targets[name] = _targets(sidecar, name, incidents)
            lacking[name] = _lacking(run, incidents)
            for incident in incidents:
                if options.all or incident["state"] != "resolved":
                    found.append((name, incident, run["layers"]))
    missing = {name: why for name, why in lacking.items() if why and options.all}
    if options.json:
        told = [{"run": name, **i} for name, i, _ in found]
        return _print_json({"incidents": told, "not_listed": missing})
    if not found and not missing:
        print(
            "no incidents"
            if options.all
            else "no open incidents; --all shows the ones that are over"
        )
        return 0
    for name, incident, layers in found:
        lines = words.incident_lines(incident, layers, name, targets[name])
        print("\n".join(words.wrapped(lines)))
    for name, why in missing.items():
        print("\n".join(words.wrapped([f"{text(name)}: {why}"])))
    return 0


def audit(options: argparse.Namespace) -> int:
    """Carry `sentinel audit` out."""
    with Remote(options) as sidecar:
        # Refusals about a run that is not known are in the log as well: its name is not looked up.
        name = quote(options.name or "", safe="")
        data = sidecar.get(f"/v1/audit?run={name}&limit={options.limit}")
    if options.json:
        return _print_json(data)
    if data["trouble"]:
        print(f"the database fails ({text(data['trouble'])}): only what is in memory")
    if not data["audit"]:
        print("nobody has asked for anything")
        return 0
    rows = [
        (
            datetime.fromtimestamp(line["at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
            text(line["actor"]),
            text(line["address"]),
            line["action"],
            text(line["run"]),
            line["outcome"],
            text(" ".join(f"{k}={v}" for k, v in line["detail"].items())),
        )
        for line in reversed(data["audit"])
    ]
    print(words.table(("at", "who", "from", "what", "run", "outcome", "detail"), rows))
    return 0


def _limit(text: str) -> int:
    try:
        limit = int(text)
    except ValueError:
        limit = 0
    if not 1 <= limit <= 1000:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1000, got {text!r}")
    return limit


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2))
    return 0


def _incidents(sidecar: Remote, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the engine, with what people did about them, and the older ones of the record."""
    try:
        recorded = sidecar.get(run_path(run["run"], "/incidents"))["incidents"]
    except RemoteError:
        recorded = []  # the database fails, or an older sidecar: the engine's own are enough
    found = {(i["number"], i["opened"]): i for i in recorded}
    for incident in (run.get("ledger") or {}).get("incidents") or ():
        key = incident["number"], incident["opened"]
        found[key] = {**found.get(key, {}), **incident}
    now = time.time()  # noqa: TID251 (the shell)
    for incident in found.values():
        incident["silenced"] = (incident.get("silenced_until") or 0.0) > now
    return sorted(found.values(), key=lambda i: (i["opened"], i["number"]))


def _lacking(run: dict[str, Any], incidents: Sequence[dict[str, Any]]) -> str:
    """How many of its incidents are not among these, and why; "" when none is lacking."""
    total = ((run.get("ledger") or {}).get("next_incident") or 1) - 1
    lacking = total - len({i["number"] for i in incidents if i["number"] <= total})
    if lacking <= 0:
        return ""
    why = "the sidecar's record does not hold them, or its database fails"
    if run.get("watched"):
        why = (
            "of a run that is only watched, its ledger keeps the open ones and the newest that "
            "are over, 32 in all"
        )
    return f"{number(lacking)} earlier {'one is' if lacking == 1 else 'ones are'} not listed: {why}"


def _targets(sidecar: Remote, run: str, incidents: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Where rollbacks went to, by the step at which they were done; {} when that is not known."""
    if not any(deed[1] == "rollback" for i in incidents for deed in i.get("actions") or ()):
        return {}
    try:
        done = sidecar.get(run_path(run, "/decisions"))["decisions"]
    except RemoteError:
        return {}
    return {
        one["step"]: one["target"]
        for one in reversed(done)
        if one["action"] == "rollback" and one["target"] is not None
    }


def _protection(run: dict[str, Any]) -> str:
    known = run["state"] == "running" and run["step"] is not None and run["protection"]
    return text(run["protection"]) if known else words.DASH


def _last_report(run: dict[str, Any]) -> str:
    """Of a run that was over when the sidecar started, the step may not have been read yet."""
    unheard = run["step"] is None and run["state"] == "running"
    return DASH_NONE if unheard else ago(run["last_report_s_ago"])


def _remarks(run: dict[str, Any]) -> str:
    said = []
    advice = run.get("open_advice") or 0
    many = (run.get("open_incidents") or 0) - advice  # the sidecar counts advice among them
    if many > 0:
        said.append(f"{many} open incident{'s' if many > 1 else ''}")
    if advice:
        said.append(f"{advice} open advice")
    skipped, back = run.get("skipped"), run.get("rolled_back")
    if back:
        said.append(f"rolled back {number(back)}x")
    if skipped:
        said.append(f"{number(skipped)} skipped")
    broken = run.get("damaged_snapshots")
    if broken:
        said.append(f"{number(broken)} damaged snapshot{'s' if broken > 1 else ''}")
    if run["mode"] == "observe":
        said.append("observing only")
    if not run["decides"]:
        said.append(f"records only: {text(run['reason'])}")
    return "; ".join(said)


def _status(run: dict[str, Any]) -> list[str]:
    """One run, in full."""
    ledger = run.get("ledger") or {}
    readings = (run.get("decision") or {}).get("readings") or {}
    live = run["state"] == "running" and run["step"] is not None
    head = f"run {text(run['run'])}: {run['state']}"
    if live:
        head += f", protection {_protection(run)}"
    lines = [head]
    lines += [f"  ! {line}" for line in _alarms(run, ledger, live)]
    if live:
        lines += [f"  warming: {text(one['detail'])}" for one in run.get("waiting") or ()]

    def row(name: str, value: str, more: str = "") -> None:
        lines.append(f"  {name:<15} {value}{f'   ({more})' if more else ''}")

    attempt = ledger.get("attempt")
    row("step", steps(run["step"]), f"attempt {attempt}" if attempt else "")
    base = readings.get("loss_baseline")
    row("loss", number(run["loss"]), "" if base is None else f"expected {number(base)}")
    mean = readings.get("norm_baseline")
    row("gradient norm", number(run["grad_norm"]), "" if mean is None else f"mean {number(mean)}")
    if run.get("decision"):
        factor = run["decision"]["lr_factor"]
        cut = f"x{number(factor)} of the schedule"
        row("learning rate", "as scheduled" if factor == 1.0 else cut)
    seen = _last_report(run)
    row("last report", seen)
    if run.get("registered_at") and not run.get("watched"):
        here = time.time()  # noqa: TID251 (the shell)
        row("registered", ago(max(here - run["registered_at"], 0.0)))
    row("policy", f"{text(run['policy'])}, mode {run['mode']}")
    if ledger:
        counters = ledger["counters"]
        row("skipped", _counts(counters["skipped"]))
        row("rolled back", _rollbacks(counters["rollbacks"]))
        row("lost steps", number(counters["lost_steps"]))
    elif run.get("skipped") is not None:  # the record does not say more
        row("skipped", number(run["skipped"]) if run["skipped"] else "none")
        row("rolled back", number(run["rolled_back"]) if run["rolled_back"] else "none")
    lines += _snapshots(run, ledger)
    record = run.get("record") or {}
    if record.get("holes") or record.get("dropped"):
        row("missing", f"{record.get('holes', 0)} steps of the record")
    misses = sum((run.get("misses") or {}).values())
    if misses:
        row("misses", f"{number(misses)} steps went on without this sidecar")
    if run.get("refused_reports"):
        row("refused", f"{number(run['refused_reports'])} reports made no sense; its log has why")

    incidents = run["incidents"]
    open_ = [i for i in incidents if i["state"] != "resolved"]
    lines.append("")
    if open_:
        lines.append("open incidents:")
        for incident in open_:
            told = words.incident_lines(incident, run["layers"], run["run"], run["targets"])
            lines += [f"  {x}" for x in told]
    else:
        over = len(incidents)
        lines.append(
            f"no open incidents; {over} over: sentinel incidents {text(run['run'])} --all"
            if over
            else "no incidents"
        )
    orders = run.get("orders") or []
    if orders:
        lines.append("orders:")
        left = len(orders) - ORDERS_SHOWN
        if left > 0:
            lines.append(f"  ... {left} earlier: sentinel audit {text(run['run'])}")
        lines += [f"  {_order(order)}" for order in orders[-ORDERS_SHOWN:]]
    return lines


def _snapshots(run: dict[str, Any], ledger: dict[str, Any]) -> list[str]:
    """What it can go back to, and whether that is still whole."""
    rows = run.get("snapshots")
    if rows is None:  # an older sidecar
        rows = [{**one, "disk": "unseen", "detail": ""} for one in ledger.get("snapshots") or ()]
    lines: list[str] = []
    for name, healthy in (("snapshots", True), ("candidates", False), ("on disk", None)):
        some = sorted((r for r in rows if r["healthy"] is healthy), key=lambda r: r["step"])
        said = [f"{steps(one['step'])}   ({_copy(one)})" for one in some]
        if some and all(one["disk"] == "unseen" for one in some):
            why = f"   ({_copy(some[0])})" if some[0]["detail"] else ""
            said = [", ".join(steps(one["step"]) for one in some) + why]
        if healthy and not some and ledger:
            said = ["none: nothing to roll back to"]
        lines += [f"  {'' if n else name:<15} {one}" for n, one in enumerate(said)]
    return lines


def _copy(row: dict[str, Any]) -> str:
    """Whether the copy on disk is whole, as far as anybody knows."""
    read = "" if row.get("checked_s_ago") is None else ago(row["checked_s_ago"])
    if row["disk"] == "sound":
        return f"verified {read}"
    if row["disk"] == "damaged":
        return f"DAMAGED on disk: {text(row['detail'])}; read {read}"
    return f"not verified: {text(row['detail'])}"


def _alarms(run: dict[str, Any], ledger: dict[str, Any], live: bool) -> list[str]:
    """What somebody should know first, each with the way out."""
    name = text(run["run"])
    said = []
    if run["step"] is None and run["state"] == "running":
        said.append("the trainer has registered and not reported a step yet")
    if run["state"] == "lost":
        said.append(
            f"no sign of life for {ago(run['last_report_s_ago']).removesuffix(' ago')}: is the "
            "process there, does it hang, is the network up?"
        )
    if run["state"] == "halted":
        said.append(f"halted; look at the incident, then: sentinel resume {name}")
    if live and ledger.get("automation") is False:
        said.append(f"a person paused automation: nothing is done; sentinel command {name} resume")
    if live and ledger.get("stopped"):
        said.append(
            "the rollback budget is spent: only non-finite steps and extreme norms are skipped; "
            f"find the cause, then: sentinel command {name} resume"
        )
    due = ledger.get("pending_restore")
    if live and due is not None:
        said.append(f"a rollback to step {steps(due)} was decided; its trainer has not done it yet")
    if live and run["mode"] == "observe":
        said.append("the policy only observes: nothing is done, what would be done is recorded")
    if live and run["protection"] == "blind":
        why = text(run.get("protection_why") or "nothing useful is measured")
        said.append(f"blind: {why}; session.status() names what is missing")
    elif live and run["protection"] == "off" and run.get("protection_why"):
        said.append(f"protection is off: {text(run['protection_why'])}")
    damaged = [one for one in run.get("snapshots") or () if one["warning"]]
    said += [f"{text(one['warning'])}; sentinel snapshots {name} --verify" for one in damaged]
    if not run["decides"]:
        said.append(f"this sidecar only records: {text(run['reason'])}")
    if run.get("second_writers_refused"):
        said.append("a second process tried to write this run and was refused")
    return said


def _counts(pairs: list[list[Any]]) -> str:
    total = sum(count for _, count in pairs)
    if not total:
        return "none"
    told = ", ".join(f"{text(key).replace('/', ' ')} {number(count)}" for key, count in pairs)
    return f"{number(total)}   ({told})"


def _rollbacks(pairs: list[list[Any]]) -> str:
    """Those that were done, and how many were due and were not."""
    done = [[key.removesuffix("/restored"), n] for key, n in pairs if key.endswith("/restored")]
    vain = sum(n for key, n in pairs if not key.endswith("/restored"))
    said = _counts(done)
    if not vain:
        return said
    why = ", ".join(
        f"{text(key).replace('/', ' ')} {number(n)}"
        for key, n in pairs
        if not key.endswith("/restored")
    )
    return f"{said}; {number(vain)} could not be done   ({why})"


def _order(order: dict[str, Any]) -> str:
    command = order["command"]
    said: str = words.ORDERS.get(command["kind"], command["kind"])
    if command["kind"] == "scale_lr":
        said += f" by {number(command['value'])}"
    elif command["kind"] == "rollback" and command["target"] is not None:
        said += f" to step {steps(command['target'])}"
    elif command["kind"] == "ack":
        said = f"acknowledge incident {command['target']}"
    said += f": {words.order_state(order)}"
    return said + (f", by {text(command['issued_by'])}" if command["issued_by"] else "")
