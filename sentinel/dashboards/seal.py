"""Whose is a dashboard in Grafana: as sentinel wrote it, or changed by somebody since?

    seal(board, version)          the board with a mark in it, for a write that gives that version
    whose(found, folder)          Owner: ours, edited, newer or files

Written into a dashboard is a hidden variable that names the release, a digest of the contents and
the version that Grafana will give it. Grafana's pages keep a variable that they do not show, so
that the mark survives an edit, and no longer fits: version and contents are others then. Either of
the two that fits is enough: Grafana may rewrite what it stores, and a dashboard that somebody put
back to an earlier version of ours is ours.

Purity:  no clock, no I/O.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from sentinel import __version__

NAME = "sentinel_mark"
_QUERY = re.compile(r"^(\S+) ([0-9a-f]{16}) v(\d+)$")


class Owner(StrEnum):
    """Who had the last word about a dashboard or a group of rules."""

    OURS = "ours"
    EDITED = "edited"  # by hand, moved, or by something that is not sentinel
    NEWER = "newer"  # a later release of sentinel
    FILES = "files"  # Grafana reads it from files


@dataclass(frozen=True, slots=True)
class Seal:
    """What the mark says."""

    release: str
    content: str
    version: int


def seal(board: dict[str, Any], version: int) -> dict[str, Any]:
    """The board with its mark.

    Args:
        version: that Grafana will give it with this write.
    """
    plain = unsealed(board)
    mark = {
        "type": "constant",
        "name": NAME,
        "label": "Written by sentinel; edits are left alone",
        "hide": 2,
        "query": f"{__version__} {digest(plain)} v{version}",
        "skipUrlSync": True,
    }
    variables = [*plain.get("templating", {}).get("list", []), mark]
    return {**plain, "templating": {**plain.get("templating", {}), "list": variables}}


def seal_of(board: dict[str, Any]) -> Seal | None:
    """The mark of a board; None without one, or with one that makes no sense."""
    for variable in _variables(board):
        if variable.get("name") == NAME:
            match = _QUERY.match(str(variable.get("query", "")))
            return Seal(match[1], match[2], int(match[3])) if match else None
    return None


def unsealed(board: dict[str, Any]) -> dict[str, Any]:
    """The board without its mark."""
    kept = [v for v in _variables(board) if v.get("name") != NAME]
    if len(kept) == len(_variables(board)):
        return board
    return {**board, "templating": {**board["templating"], "list": kept}}


def digest(board: dict[str, Any]) -> str:
    """Of what a board says, whatever number and version Grafana gave it."""
    said = {k: v for k, v in unsealed(board).items() if k not in ("id", "version")}
    text = json.dumps(_whole(said), sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def whose(found: dict[str, Any], folder: str) -> Owner:
    """Of a dashboard as Grafana gives it: {"dashboard": ..., "meta": ...}.

    Args:
        folder: where it belongs.
    """
    board, meta = found["dashboard"], found.get("meta", {})
    if meta.get("provisioned"):
        return Owner.FILES
    mark = seal_of(board)
    if mark is None or (board.get("version") != mark.version and digest(board) != mark.content):
        return Owner.EDITED
    if meta.get("folderUid", folder) != folder:
        return Owner.EDITED
    return Owner.NEWER if newer(mark.release) else Owner.OURS


def whose_rules(there: dict[str, Any], group: dict[str, Any]) -> Owner:
    """Of a group of alert rules as Grafana gives it.

    Its pages do not edit rules that came by the API. So one that did not come that way was freed
    for editing or made by hand, and so was one that we do not know.
    """
    known = {str(rule.get("uid")) for rule in group.get("rules", [])}
    for rule in there.get("rules", []):
        if rule.get("provenance") == "file":
            return Owner.FILES
        if rule.get("provenance") != "api" or str(rule.get("uid")) not in known:
            return Owner.EDITED
    return Owner.OURS


def newer(release: str) -> bool:
    """Whether that release is later than this one."""
    return _parts(release) > _parts(__version__)


def _parts(release: str) -> tuple[int, ...]:
    """The numbers of 1.2.3, without what may follow."""
    match = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _whole(value: Any) -> Any:
    """The same with 1.0 as 1: Grafana knows one kind of number."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _variables(board: dict[str, Any]) -> list[dict[str, Any]]:
    found = board.get("templating", {}).get("list", [])
    return [v for v in found if isinstance(v, dict)] if isinstance(found, list) else []
