"""`sentinel command | ack | silence`: what a person does to a run.

    sentinel command r7 pause | resume | skip | rollback [--to STEP] | scale-lr 0.5 | halt
    sentinel ack r7:3                       the incident that `sentinel incidents` calls r7:3
    sentinel silence r7:3 --for 2h          shown as silenced; says how to silence its alerts

An order is carried out at the next step that hears of it, once: sending it again with the same --id
changes nothing. `command` waits a little to tell what became of it.

Exit:    0; 1 when it was refused, failed or was not carried out, or the sidecar cannot be asked; 3
         when it was not obeyed yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sentinel.cli import words
from sentinel.cli.failing import UsageError
from sentinel.cli.remote import Remote, RemoteError, add_options, me, run_path

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

KINDS = {
    "pause": "pause",
    "resume": "resume",
    "skip": "skip_next",
    "rollback": "rollback",
    "scale-lr": "scale_lr",
    "halt": "halt",
}
LOSES = {
    "rollback": "The steps since the snapshot will be lost.",
    "halt": "The training process will end with exit code 86.",
}
NOT_YET = 3
OPEN = ("pending", "delivered", "restoring")
POLL_S = 0.5
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_parsers(subparsers: Subparsers) -> None:
    """Register the subcommands."""
    parser = subparsers.add_parser(
        "command",
        help="order a run to pause, resume, skip, roll back, scale its learning rate, halt",
        description="Give a run an order; it is carried out at the next step that hears of it.",
    )
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("order", choices=tuple(KINDS), metavar="|".join(KINDS))
    parser.add_argument("factor", nargs="?", type=float, help="of scale-lr: above 0, at most 10")
    parser.add_argument(
        "--to", type=int, metavar="STEP", help="of rollback: a healthy snapshot, else the newest"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask before rollback and halt")
    parser.add_argument("--id", help="the same id again is the same order")
    parser.add_argument(
        "--expires", type=_seconds, default=600.0, metavar="TIME", help="like 90s or 10m (10m)"
    )
    parser.add_argument(
        "--wait", type=_seconds, default=10.0, metavar="TIME", help="to be obeyed (10s); 0: do not"
    )
    parser.add_argument("--by", default=None, help="who orders it (your login)")
    add_options(parser)
    parser.set_defaults(run=command)

    parser = subparsers.add_parser("ack", help="say that you have taken an incident")
    _incident(parser)
    parser.set_defaults(run=ack)

    parser = subparsers.add_parser(
        "silence", help="show an incident as silenced; says how to silence its alerts"
    )
    _incident(parser)
    parser.add_argument(
        "--for",
        dest="for_s",
        type=_seconds,
        default=7200.0,
        metavar="TIME",
        help="like 30m, 2h, 1d (2h); 0 ends it",
    )
    parser.set_defaults(run=silence)


def _incident(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("incident", metavar="RUN:NUMBER", help="as `sentinel incidents` lists it")
    parser.add_argument("--by", default=None, help="who it is (your login)")
    add_options(parser)


def _seconds(text: str) -> float:
    unit = _UNITS.get(text[-1:], 0.0)
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a time like 90s, 10m or 2h, got {text!r}")
    return value


def command(options: argparse.Namespace) -> int:
    """Carry `sentinel command` out."""
    body = _body(options)
    with Remote(options) as sidecar:
        asks = options.order in LOSES and not options.yes and sys.stdin.isatty()
        if asks and not _sure(sidecar, options):
            print("not sent")
            return 1
        try:
            order = sidecar.post(run_path(options.name, "/commands"), body)
        except RemoteError as error:
            if error.status == 404:
                sidecar.run(options.name, whole=True)  # says which runs there are
            raise
        if order.get("warning") and not asks and not options.json:
            print(f"! {words.text(order['warning'])}", flush=True)
        if order.get("run_state", "running") == "running":  # nobody is there to obey it now
            _wait(sidecar, options, order)
    if options.json:
        print(json.dumps(order, indent=2))
    else:
        print(_told(options.name, order))
    if order["state"] in ("failed", "superseded"):
        return 1
    return 0 if order["state"] in ("taken", "acknowledged") or not options.wait else NOT_YET


def _sure(sidecar: Remote, options: argparse.Namespace) -> bool:
    """Ask whoever sits at the terminal; what speaks against it comes first."""
    if options.order == "rollback":
        known = sidecar.run(options.name, whole=True)
        healthy = [one for one in known.get("snapshots") or () if one["healthy"]]
        for one in healthy if options.to is not None else healthy[:1]:
            if one["warning"] and options.to in (None, one["step"]):
                print(f"! {words.text(one['warning'])}")
    what = f"{options.order} run {words.text(options.name)}? [y/N] "
    print(f"{LOSES[options.order]} Really {what}", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _body(options: argparse.Namespace) -> dict[str, Any]:
    kind = KINDS[options.order]
    if (options.factor is not None) != (kind == "scale_lr"):
        raise UsageError(
            "scale-lr needs a factor above 0 and at most 10: sentinel command RUN scale-lr 0.5"
            if kind == "scale_lr"
            else f"{options.order} takes no number, got {options.factor:g}"
            + ("; a snapshot is named with --to STEP" if kind == "rollback" else "")
        )
    if options.to is not None and kind != "rollback":
        raise UsageError(f"--to belongs to rollback, not to {options.order}")
    body: dict[str, Any] = {
        "kind": kind,
        "id": options.id or uuid.uuid4().hex,
        "issued_by": me() if options.by is None else options.by,
        "expires_in_s": options.expires,
    }
    if options.factor is not None:
        body["value"] = options.factor
    if options.to is not None:
        body["target"] = options.to
    return body


def _wait(sidecar: Remote, options: argparse.Namespace, order: dict[str, Any]) -> None:
    """Look what becomes of it for a while; `order` is brought up to date."""
    until = time.monotonic() + options.wait  # noqa: TID251 (the shell)
    while order["state"] in OPEN and time.monotonic() < until:  # noqa: TID251
        time.sleep(POLL_S)
        for found in sidecar.run(options.name)["orders"]:
            if found["command"]["id"] == order["id"]:
                order.update(state=found["state"], taken_step=found["taken_step"])
                order["result"] = found.get("detail", "")


def _told(run: str, order: dict[str, Any]) -> str:
    said: str = f"{words.ORDERS.get(order['kind'], '')}: "
    said += words.order_state(order | {"detail": order.get("result", "")})
    if order["state"] in ("pending", "delivered") and order.get("run_state") == "lost":
        said += f"; {words.text(order['detail'])}"
    elif order["state"] in ("pending", "delivered"):
        said += f"; it is told with every step until it expires: sentinel status {words.text(run)}"
    if not order.get("recorded", True):
        said += " (the sidecar's database fails: this order is in its memory only)"
    return said


def ack(options: argparse.Namespace) -> int:
    """Carry `sentinel ack` out."""
    return _post(options, "ack", {})


def silence(options: argparse.Namespace) -> int:
    """Carry `sentinel silence` out."""
    return _post(options, "silence", {"for_s": options.for_s})


def _post(options: argparse.Namespace, what: str, body: dict[str, Any]) -> int:
    run, _, number = options.incident.rpartition(":")
    if not run or not (number.isascii() and number.isdigit()):
        raise UsageError(
            f"an incident is named RUN:NUMBER, such as {words.text(options.incident)}:1, as "
            f"`sentinel incidents` lists it, got {options.incident!r}"
        )
    body["by"] = me() if options.by is None else options.by
    with Remote(options) as sidecar:
        done = sidecar.post(f"/v1/incidents/{quote(options.incident, safe='')}/{what}", body)
    if options.json:
        print(json.dumps(done, indent=2))
    else:
        said = f"{words.text(done['incident'])}: {words.text(done['detail'])}"
        if not done.get("recorded", True):
            said += " (the sidecar's database fails: this is in its memory only, until it is well)"
        print(said)
    return 0
