"""The zygote: torch is imported once, and every rank of every run is a fork of this process.

    python -m tests.support.ranks.zygote [MODULE ...]        reads jobs from stdin, one JSON a line

It stays single-threaded and never makes a process group, so that a fork of it is a sound start.
Every fork dies with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Any

import torch
import torch._dynamo
import torch._inductor.utils
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.nn.parallel

import sentinel_hooks.attaching
from tests.support.ranks import loop, rank

_libc = ctypes.CDLL(None)
TEXT = 6000  # bytes of a rank's output that are reported


def _dies_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)


class _Child:
    """A rank as the zygote sees it."""

    def __init__(self, number: int, pid: int, pipe: int) -> None:
        self.number, self.pid, self.pipe = number, pid, pipe
        self.left = b""
        self.records: list[dict[str, Any]] = []
        self.exit: int | None = None
        self.ended = 0.0
        self.overdue = False
        self.stops: list[float] = []  # lengths asked for, not yet begun
        self.wake = 0.0

    def drain(self) -> None:
        while True:
            try:
                data = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, self.left = (self.left + data).split(b"\n")
            for line in lines:
                record = json.loads(line)
                self.records.append(record)
                if record["what"] == "stop":
                    self.stops.append(record["seconds"])


def _fork_store() -> tuple[int, int]:
    """A process that holds the store, as torchrun's agent does; its pid and port."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _dies_with_parent()
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            os.write(write, f"{store.port}\n".encode())
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    port = int(os.read(read, 64))
    os.close(read)
    return pid, port


def _fork_rank(job: dict[str, Any], number: int, port: int) -> _Child:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        os.set_blocking(read, False)
        return _Child(number, pid, read)
    code = 1
    try:
        _dies_with_parent()
        os.close(read)
        os.chdir(job["directory"])
        for stream, name in ((0, os.devnull), (1, f"rank{number}.txt"), (2, f"rank{number}.txt")):
            flags = os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            handle = os.open(name, flags, 0o644)
            os.dup2(handle, stream)
            os.close(handle)
        os.environ.update(
            job["environment"],
            RANK=str(number),
            LOCAL_RANK=str(number),
            WORLD_SIZE=str(job["ranks"]),
            LOCAL_WORLD_SIZE=str(job["ranks"]),
            GROUP_RANK="0",
            GROUP_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        module, _, name = job["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        me = rank.Rank(number, job["ranks"], port, job["store"], write, job["args"])
        code = function(me) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = rank.RAISED
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _reap(children: list[_Child], began: float) -> None:
    for child in children:
        if child.exit is not None:
            continue
        pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED)
        if not pid:
            if child.wake and time.monotonic() >= child.wake:
                child.wake = 0.0
                os.kill(child.pid, signal.SIGCONT)
        elif os.WIFSTOPPED(status):
            child.drain()
            child.wake = time.monotonic() + (child.stops.pop(0) if child.stops else 0.0)
        else:
            child.drain()
            child.exit = os.waitstatus_to_exitcode(status)
            child.ended = time.monotonic() - began


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One run, from the forks to the report."""
    began = time.monotonic()
    store, port = _fork_store() if job["store"] == "agent" else (0, _free_port())
    children = [_fork_rank(job, number, port) for number in range(job["ranks"])]
    deadline = began + job["bound_s"]
    try:
        while any(c.exit is None for c in children):
            select.select([c.pipe for c in children if c.exit is None], [], [], 0.02)
            for child in children:
                if child.exit is None:
                    child.drain()
            _reap(children, began)
            if job["die_together"] and any(c.exit == -signal.SIGKILL for c in children):
                for child in children:
                    if child.exit is None:
                        os.kill(child.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                _say_where(children)
                for child in children:
                    if child.exit is None:
                        child.overdue = True
                        os.kill(child.pid, signal.SIGKILL)
                deadline = float("inf")
    finally:
        if store:
            os.kill(store, signal.SIGKILL)
            os.waitpid(store, 0)
    wall = time.monotonic() - began
    reports = []
    for child in children:
        child.drain()
        os.close(child.pipe)
        reports.append(
            {
                "rank": child.number,
                "exit": child.exit,
                "ended_s": child.ended,
                "overdue": child.overdue,
                "records": child.records,
                "text": _tail(os.path.join(job["directory"], f"rank{child.number}.txt")),
            }
        )
    return {"ranks": reports, "wall_s": wall}


def _say_where(children: list[_Child]) -> None:
    """Who hangs writes where (faulthandler), before it is killed."""
    for child in children:
        if child.exit is None:
            os.kill(child.pid, signal.SIGCONT)
            os.kill(child.pid, signal.SIGUSR1)
    time.sleep(0.5)


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read()[-TEXT:].decode(errors="replace")
    except FileNotFoundError:
        return ""


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    """See the module docstring."""
    _dies_with_parent()
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert loop
    assert sentinel_hooks.attaching
    out = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        report = json.dumps(run(json.loads(line))).encode() + b"\n"
        while report:
            report = report[os.write(out, report) :]


if __name__ == "__main__":
    main()
