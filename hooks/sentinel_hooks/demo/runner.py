"""All runs of the demo: two at a time, each in a single-threaded process of its own.

    results = run_all(settings_of_every_run, folder, progress)

Unprotected and protected runs of one fault follow each other in the queue, so that on two cores
they train side by side. The first run that breaks stops the others: half a table is no table.

Errors:  DemoError with the end of the broken run's log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sentinel_hooks.demo.corpus import DemoError
from sentinel_hooks.demo.faults import FAULTS
from sentinel_hooks.demo.sidecar import tail
from sentinel_hooks.demo.train import Settings

SIDE_BY_SIDE = 2
LOOK_S = 0.2
QUIET_LINE_EVERY_S = 20.0  # where there is no terminal to redraw a line on


@dataclass(slots=True)
class Run:
    """One run and how far it is."""

    settings: Settings
    step: int = -1
    loss: float | str = ""
    result: dict[str, Any] | None = None
    error: str = ""
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        how = "protected" if self.settings.protected else "unprotected"
        return f"{FAULTS[self.settings.fault].label}, {how}"

    def __str__(self) -> str:
        loss = f" loss {float(self.loss):.2f}" if self.loss != "" else ""
        return f"{self.name} {self.step + 1}/{self.settings.steps}{loss}"


class Progress:
    """One line that is redrawn on a terminal; elsewhere a line now and then."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.perf_counter) -> None:
        self._out, self._clock = out, clock
        self._live = out.isatty()
        self._started = self._drawn = clock()

    def line(self, text: str) -> None:
        """A line that stays."""
        self._out.write(("\r\x1b[K" if self._live else "") + text + "\n")
        self._out.flush()

    def show(self, runs: Sequence[Run]) -> None:
        """How far the runs are."""
        now = self._clock()
        if not self._live and now - self._drawn < QUIET_LINE_EVERY_S:
            return
        active = [run for run in runs if run.process is not None and run.result is None]
        if not active:
            return
        self._drawn = now
        minutes, seconds = divmod(int(now - self._started), 60)
        done = sum(run.result is not None for run in runs)
        text = " | ".join([f"{minutes}:{seconds:02d}  {done}/{len(runs)} runs", *map(str, active)])
        if self._live:
            width = _columns() - 1
            self._out.write("\r\x1b[K" + text[:width])
        else:
            self._out.write(text + "\n")
        self._out.flush()


def run_all(
    todo: Sequence[Settings],
    folder: Path,
    progress: Progress,
    on_done: Callable[[Sequence[Run]], None] = lambda runs: None,
) -> list[Run]:
    """Train everything; returns the runs in the order of `todo`.

    Args:
        on_done: called after each run that ended, with all runs.

    Raises:
        DemoError: a run broke; the others were stopped.
    """
    runs = [Run(settings) for settings in todo]
    waiting, active = list(runs), list[tuple[Run, threading.Thread]]()
    try:
        while waiting or active:
            while waiting and len(active) < SIDE_BY_SIDE:
                run = waiting.pop(0)
                active.append((run, _start(run, folder)))
            time.sleep(LOOK_S)
            progress.show(runs)
            ended = [(run, thread) for run, thread in active if not thread.is_alive()]
            active = [pair for pair in active if pair not in ended]
            for run, _ in ended:
                if run.error:
                    raise DemoError(f"the run '{run.name}' broke: {run.error}")
                on_done(runs)
    finally:
        for run, thread in active:
            if run.process is not None:
                run.process.kill()
            thread.join()
    return runs


def _start(run: Run, folder: Path) -> threading.Thread:
    log = folder / f"{run.settings.run_id}{'' if run.settings.protected else '-unprotected'}.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with log.open("w") as errors:
        run.process = subprocess.Popen(  # noqa: S603 - our own command, no shell
            [sys.executable, "-m", "sentinel_hooks.demo.train", run.settings.to_json()],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
    thread = threading.Thread(target=_follow, args=(run, run.process, log), daemon=True)
    thread.start()
    return thread


def _follow(run: Run, process: subprocess.Popen[str], log: Path) -> None:
    """Read what the run tells until it ends; what breaks here breaks the run."""
    assert process.stdout is not None
    result: dict[str, Any] | None = None
    with process.stdout as lines:
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # a library that prints: not ours to judge
            if "result" in message:
                result = message["result"]
            else:
                run.step, run.loss = message["step"], message["loss"]
    status = process.wait()
    if status != 0 or result is None:
        run.error = f"exit status {status}; the end of its log:\n{tail(log)}"
    else:
        run.result = result


def _columns() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 120
