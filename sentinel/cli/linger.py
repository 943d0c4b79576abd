"""Leave a sidecar up after its command, until whoever scrapes it has seen how its runs ended.

    until_seen(url, most_s=45.0)               ends at once where nobody scrapes, or nothing ended

A run's end is told to Prometheus by nothing but the next scrape: a sidecar that ends with its
command takes it along, and the alert SentinelSilent then asks where the run is. So the sidecar is
waited for, but only where it was scraped before, only while a run of it has ended well, and only
until the next scrape. Ctrl-C, or a signal to end, is enough.

Units:   seconds.
Errors:  none: a sidecar that does not answer is not waited for.
"""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any

from sentinel.client import Client, MissError

POLL_S = 0.5
DEADLINE_S = 5.0
_SCRAPES = re.compile(
    r'^sentinel_sidecar_requests_total\{[^}]*route="metrics"[^}]*\} ([0-9.e+]+)$', re.MULTILINE
)


class _Enough(Exception):
    pass


def until_seen(url: str, most_s: float, say: Any = lambda text: None) -> bool:
    """Wait for the next scrape.

    Args:
        say: is told once that and why it waits.

    Returns:
        Whether there was nothing to wait for, or it was seen.
    """

    def enough(number: int, frame: Any) -> None:
        raise _Enough

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, enough) for number in numbers}
    client = Client(url)
    try:
        return _wait(client, time.perf_counter() + most_s, most_s, say)
    except (MissError, ValueError):
        return True
    except _Enough:
        return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        client.close()


def _wait(client: Client, until: float, most_s: float, say: Any) -> bool:
    before = _scrapes(client)
    if most_s <= 0.0 or not before or not _all_over(client):
        return True
    say(
        f"the sidecar stays until it is scraped once more, {most_s:g} s at most, so that "
        "Prometheus sees how the run ended; Ctrl-C ends it now (--linger 0: never)"
    )
    ours = 0
    while time.perf_counter() < until:
        time.sleep(POLL_S)
        ours += 1
        if _scrapes(client) - ours > before:
            return True
    return False


def _scrapes(client: Client) -> float:
    """How often it was scraped before this very time."""
    text = client.get("/metrics", deadline_s=DEADLINE_S).decode()
    return sum(float(count) for count in _SCRAPES.findall(text))


def _all_over(client: Client) -> bool:
    """Whether its runs have ended: of one that died nobody will ever hear more."""
    runs = json.loads(client.get("/v1/runs", deadline_s=DEADLINE_S))["runs"]
    return bool(runs) and all(run["state"] in ("finished", "halted") for run in runs)
