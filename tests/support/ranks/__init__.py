"""Several real ranks for a test: gloo processes forked from one that has torch imported already.

    with Ranks() as ranks:                                    one zygote for many runs
        report = ranks.run("tests.support.ranks.loop:train", 4, args={"world": "ddp"})
        report.ranks[2].said("step")                          what rank 2 said, record by record

A run: the zygote forks a store (as torchrun's agent holds one, it outlives any rank) and N ranks,
each calls the function `module:name` with a `rank.Rank`. What a rank says goes line by line through
a pipe to the zygote, so that it survives a SIGKILL and a full disk. A rank that is stopped is
continued by the zygote after the time it asked for; whoever is not done at the bound is killed and
the report says so.

The client imports no torch. Threads: one run at a time.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support import ROOT


@dataclass(slots=True)
class RankReport:
    """What one rank left behind.

    Attributes:
        exit: its exit code; minus the signal that ended it.
        ended_s: seconds from the fork to its end.
        overdue: it was still there at the bound, and killed by the zygote.
        records: what it said, in order; each has "what".
        text: the end of its stdout and stderr.
    """

    rank: int
    exit: int
    ended_s: float
    overdue: bool = False
    records: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""

    def said(self, what: str) -> list[dict[str, Any]]:
        """All records of one kind."""
        return [r for r in self.records if r["what"] == what]

    def last(self, what: str) -> dict[str, Any]:
        """The last one; an AssertionError that shows the rank's text when there is none."""
        found = self.said(what)
        assert found, f"rank {self.rank} never said {what!r} (exit {self.exit}): {self.text}"
        return found[-1]


@dataclass(slots=True)
class Report:
    """One run: its ranks, and how long all of it took."""

    ranks: list[RankReport]
    wall_s: float
    directory: Path

    @property
    def overdue(self) -> list[int]:
        """Ranks that did not end by themselves."""
        return [r.rank for r in self.ranks if r.overdue]

    def ended_well(self) -> None:
        """Raises AssertionError with the texts unless every rank ended with 0."""
        bad = [r for r in self.ranks if r.exit or r.overdue]
        assert not bad, "\n".join(f"rank {r.rank}: exit {r.exit}\n{r.text}" for r in bad)


class Ranks:
    """The client of one zygote."""

    def __init__(self, *, preload: tuple[str, ...] = ()) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
            "PYTHONFAULTHANDLER": "1",
        }
        for name in ("SENTINEL_SIDECAR", "SENTINEL_RUN_ID", "TORCHELASTIC_RUN_ID"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks.zygote", *preload],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self.close)

    def run(
        self,
        function: str,
        ranks: int,
        *,
        args: dict[str, Any] | None = None,
        bound_s: float = 90.0,
        environment: dict[str, str] | None = None,
        store: str = "agent",
        directory: Path | None = None,
        die_together: bool = False,
    ) -> Report:
        """Fork, wait, collect.

        Args:
            function: `module:name`, called with a rank.Rank in each process.
            bound_s: from the fork; who is not done then is killed.
            store: "agent" (a process of its own holds the TCPStore) or "rank0".
            directory: each rank's current folder; default a fresh one, gone with the zygote.
            die_together: once a rank was killed, so are all others, at once.
        """
        self._runs += 1
        if directory is None:
            directory = Path(self._scratch.name) / f"{self._runs:03d}"
        directory.mkdir(parents=True, exist_ok=True)
        job = {
            "function": function,
            "ranks": ranks,
            "args": args or {},
            "bound_s": bound_s,
            "environment": environment or {},
            "store": store,
            "directory": str(directory),
            "die_together": die_together,
        }
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        pipe_in.write(json.dumps(job).encode() + b"\n")
        pipe_in.flush()
        ready, _, _ = select.select([pipe_out], [], [], bound_s + 60)
        line = pipe_out.readline() if ready else b""
        assert line, f"the zygote has gone or hangs (exit {self._process.poll()})"
        found = json.loads(line)
        return Report(
            [RankReport(**r) for r in found["ranks"]], float(found["wall_s"]), Path(directory)
        )

    def close(self) -> None:
        """The zygote ends, and with it every process it has forked."""
        atexit.unregister(self.close)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._scratch.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
