"""Read a run's ledger with json and hashlib only; nothing of sentinel's is imported here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def checksum(body: bytes) -> bytes:
    """blake2b-128, in hexadecimal digits."""
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()


def read_ledger(directory: Path) -> dict[str, Any]:
    """The ledger, moved on by the lines of its tail."""
    body, check = (directory / "ledger").read_bytes().splitlines()
    assert checksum(body) == check
    data: dict[str, Any] = json.loads(body)
    tail = directory / "ledger.tail"
    for text in tail.read_bytes().splitlines() if tail.exists() else ():
        line, _, its = text.rpartition(b" ")
        if checksum(line) == its and json.loads(line)["base"] == check.decode():
            moved = json.loads(line)
            data |= {"step": moved["step"], "ledger": moved["ledger"]}
            data["marks"] += moved.get("marks", [])
    return data
