"""What a forked rank is given: its number, the process group, and a way to say things.

    me.join(timeout_s)              the default process group, over gloo
    me.say("step", t=3, held=True)  one record; it is in the report even if the next line kills us
    me.at("loop.forward:entry")     a place: the fault that was ordered for it happens here

Faults (args["faults"], a list): {"kind", "rank", "step", "place", "nth", "seconds", "always"}: at
the nth passing (from 0) of `place` in the first step >= `step` that passes it; with "always" at
every passing from then on. Kinds:

    raise       an exception of ours (only where the caller says it may: see places.py)
    sleep       the thread that passes sleeps `seconds`
    stop        the whole process is stopped (SIGSTOP) and continued after `seconds`
    kill        SIGKILL
    full_disk   from here on no file of this process grows (RLIMIT_FSIZE 0)
"""

from __future__ import annotations

import datetime as dt
import faulthandler
import json
import os
import resource
import signal
import threading
import time
from typing import Any

import torch.distributed as dist

RAISED = 70  # exit code: the function raised


class InjectedError(RuntimeError):
    """What the fault `raise` raises."""


class Rank:
    """One process of a run."""

    def __init__(
        self, number: int, ranks: int, port: int, store: str, pipe: int, args: dict[str, Any]
    ) -> None:
        self.number, self.ranks, self.port = number, ranks, port
        self.args = args
        self.step = -1
        self.passed: list[tuple[int, str]] | None = None  # (step, place), when surveying
        self._store = store
        self._pipe = pipe
        self._faults = [f for f in args.get("faults", []) if f["rank"] == number]
        self._counts: dict[tuple[int, str], int] = {}
        self._home = threading.get_ident()
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def join(self, timeout_s: float) -> Any:
        """Make the default process group; returns the store."""
        mine = self._store == "rank0" and self.number == 0
        wait = dt.timedelta(seconds=max(timeout_s, 20.0))
        store = dist.TCPStore(
            "127.0.0.1", self.port, self.ranks, mine, wait, wait_for_workers=False
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.number,
            world_size=self.ranks,
            timeout=dt.timedelta(seconds=timeout_s),
        )
        return store

    def say(self, what: str, **fields: Any) -> None:
        """One record to the zygote; larger than a pipe's atomic write only without threads."""
        line = json.dumps({"what": what, **fields}).encode() + b"\n"
        while line:
            line = line[os.write(self._pipe, line) :]

    def fault(self, kind: str) -> dict[str, Any] | None:
        """The fault of this kind that is due in this step, for those the loop carries out."""
        return next((f for f in self._faults if f["kind"] == kind and f["step"] == self.step), None)

    def survey(self) -> dict[str, Any]:
        """Places passed since the last call, in "passed"; "!" marks those that may not raise."""
        if self.passed is None:
            return {}
        found, self.passed = sorted({place for _, place in self.passed}), []
        return {"passed": found}

    def at(self, place: str, *, may_raise: bool = False) -> None:
        """A place is passed."""
        if self.passed is not None and threading.get_ident() == self._home:
            self.passed.append((self.step, place if may_raise else f"{place}!"))
        for fault in self._faults:
            if fault.get("place") != place or self.step < fault["step"] or fault.get("done"):
                continue
            key = (self.step, place)
            nth = self._counts[key] = self._counts.get(key, -1) + 1
            if nth == fault.get("nth", 0) or fault.get("always"):
                fault["done"] = not fault.get("always")
                self._happen(fault)

    def _happen(self, fault: dict[str, Any]) -> None:
        kind = fault["kind"]
        self.say("fault", step=self.step, kind=kind, place=fault["place"])
        if kind == "raise":
            raise InjectedError(f"injected at {fault['place']}")
        if kind == "sleep":
            time.sleep(fault["seconds"])
        elif kind == "stop":
            self.say("stop", seconds=fault["seconds"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        elif kind == "full_disk":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        else:
            raise AssertionError(f"no fault is called {kind!r}")
