"""What a sidecar costs: a real `sentinel serve` process, its CPU time from /proc, real sockets.

CPU time of the server says what one core can carry; the latencies are wall time as a client sees
them, and worth no more than the machine was idle. Rules, store and trace are on.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sentinel.core.policy import Policy
from sentinel.core.types import Column
from sentinel.sidecar import exporter
from sentinel.sidecar.service import Service
from sentinel.sidecar.settings import Settings
from sentinel.traces.records import INDEX_DTYPE
from sentinel.traces.segments import SegmentWriter
from sentinel.traces.summary import footer
from sentinel.wire import codec, messages
from sentinel.wire.messages import HandOver, Layer, Register, Registered, Steps
from tests.bench.timing import cpu_us, machine, table
from tests.support.reports import Reporter, frames
from tests.support.sidecars import serving
from tests.support.simulated import SimulatedTrainer

POLICY = Policy.load("default")
TICK = os.sysconf("SC_CLK_TCK")


class Six(SimulatedTrainer):
    """Six columns instead of three."""

    def _columns(self, step: int, norm: float, logit: float) -> dict[str, Column]:
        found = super()._columns(step, norm, logit)
        one = np.full(self.layers, 0.5, np.float32)
        names = ("layer_update_ratio", "layer_activation_rms", "layer_activation_absmax")
        return found | dict.fromkeys(names, one * 0.001) | {"layer_weight_norm": one}


def trained(layers: int, steps: int) -> SimulatedTrainer:
    trainer = Six(seed=1, layers=layers)
    trainer.run(steps)
    return trainer


class Line:
    """One keep-alive connection that speaks as little HTTP as it takes."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, method: str, path: str, body: bytes) -> bytes:
        """The body of the answer."""
        self._socket.sendall(request(method, path, body))
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._socket.recv(65536)
        head, _, rest = data.partition(b"\r\n\r\n")
        lower = head.lower()
        at = lower.index(b"content-length:") + 15
        length = int(lower[at : lower.find(b"\r\n", at) if b"\r\n" in lower[at:] else None])
        while len(rest) < length:
            rest += self._socket.recv(65536)
        assert head.startswith(b"HTTP/1.1 2"), head + rest
        return rest

    def close(self) -> None:
        self._socket.close()


def request(method: str, path: str, body: bytes) -> bytes:
    seal = messages.seal("", path, body)
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {messages.CONTENT_TYPE}\r\n"
        f"{messages.SEAL_HEADER}: {seal}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def register(line: Line, run: str, layers: int) -> int:
    message = Register(
        run=run,
        incarnation="i",
        policy=codec.encode_policy(POLICY),
        layers=tuple(Layer(f"blocks.{at}.attn.proj") for at in range(layers)),
    )
    data = line.ask("PUT", f"/v1/runs/{run}", messages.encode_message(message))
    return messages.decode_message(Registered, data).fence


def hand_over(line: Line, run: str, fence: int, trainer: SimulatedTrainer, since: int = 0) -> None:
    state = codec.encode_state(trainer.steps[since].before)
    message = HandOver(run=run, incarnation="i", fence=fence, seq=0, state=state)
    line.ask("PUT", f"/v1/runs/{run}/state", messages.encode_message(message))


def bodies(run: str, fence: int, raws: list[bytes]) -> list[bytes]:
    digest = codec.policy_hash(POLICY)
    return [
        messages.encode_message(
            Steps(
                run=run,
                incarnation="i",
                fence=fence,
                policy_hash=digest,
                frames=(msgspec.Raw(raw),),
            )
        )
        for raw in raws
    ]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def milliseconds(seconds: list[float]) -> tuple[str, str]:
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2] * 1e3:.2f}", f"{ordered[-len(ordered) // 100] * 1e3:.2f}"


def one_trainer(process: Any, layers: int, steps: int) -> tuple[str, ...]:
    trainer = trained(layers, steps)
    line, run = Line(process.port), f"one-{layers}"
    fence = register(line, run, layers)
    hand_over(line, run, fence, trainer)
    raws = [messages.encode_frame(frame) for frame in frames(trainer.steps)]
    sent = bodies(run, fence, raws)
    path, waits = f"/v1/runs/{run}/steps", []
    warm = steps // 10
    for body in sent[:warm]:
        line.ask("POST", path, body)
    before = cpu_s(process.process.pid)
    for body in sent[warm:]:
        start = time.perf_counter()
        answer = line.ask("POST", path, body)
        waits.append(time.perf_counter() - start)
    spent = cpu_s(process.process.pid) - before
    reply = messages.decode_message(messages.Reply, answer)
    assert reply.decision is not None, reply
    line.close()
    each = spent / len(waits)
    return (
        f"{layers} layers x 6" if layers else "10 scalars",
        f"{len(sent[-1]) / 1000:.1f}",
        f"{each * 1e6:.0f}",
        f"{1 / each:,.0f}",
        *milliseconds(waits),
    )


def many_trainers(runs: int, layers: int, seconds: int, since: int) -> tuple[str, ...]:
    """`runs` trainers, each with a connection of its own, one report a second, from a step on."""
    trainer = trained(layers, since + seconds + 2)
    raws = [messages.encode_frame(frame) for frame in frames(trainer.steps[since:])]
    with serving() as process:
        lines, sent = [], []
        for number in range(runs):
            line = Line(process.port)
            fence = register(line, f"m{number}", layers)
            hand_over(line, f"m{number}", fence, trainer, since)
            lines.append(line)
            sent.append(bodies(f"m{number}", fence, raws))
        pid, waits = process.process.pid, []
        for at, line in enumerate(lines):
            line.ask("POST", f"/v1/runs/m{at}/steps", sent[at][0])
        before, start = cpu_s(pid), time.perf_counter()
        for step in range(1, seconds + 1):
            for at, line in enumerate(lines):
                due = start + step - 1 + at / runs
                while (early := due - time.perf_counter()) > 0:
                    time.sleep(early)
                asked = time.perf_counter()
                line.ask("POST", f"/v1/runs/m{at}/steps", sent[at][step])
                waits.append(time.perf_counter() - asked)
        wall = time.perf_counter() - start
        share = (cpu_s(pid) - before) / wall
        rate = len(waits) / wall
        memory = resident_mb(pid)
        for line in lines:
            line.close()
    return (
        f"{runs} at 1/s, {layers} layers x 6, from step {since}",
        f"{rate:,.0f}",
        f"{share:.0%}",
        *milliseconds(waits),
        f"{memory:.0f}",
    )


def memory(runs: int, reports: int) -> list[tuple[str, ...]]:
    """Resident memory of a server with `runs` runs, while reports come in."""
    trainer = trained(0, reports // runs)
    raws = [messages.encode_frame(frame) for frame in frames(trainer.steps)]
    rows = []
    with serving() as process:
        pid, line = process.process.pid, Line(process.port)
        fences = []
        for at in range(runs):
            fences.append(register(line, f"m{at}", 0))
            hand_over(line, f"m{at}", fences[-1], trainer)
        rows.append(("0", f"{resident_mb(pid):.0f}"))
        done = 0
        for step, raw in enumerate(raws):
            for at, fence in enumerate(fences):
                line.ask("POST", f"/v1/runs/m{at}/steps", bodies(f"m{at}", fence, [raw])[0])
            done += runs
            if step + 1 in (len(raws) // 4, len(raws) // 2, len(raws)):
                rows.append((f"{done:,}", f"{resident_mb(pid):.0f}"))
        line.close()
    return rows


@contextmanager
def in_process(**settings: Any) -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as folder:
        service = Service(
            Settings(data_dir=Path(folder), **settings),
            clock=time.time,
            timer=time.perf_counter,
        )
        yield service
        service.close()


def scrape(runs: int, layers: int, which: exporter.Layers) -> tuple[str, ...]:
    with in_process() as service:
        trainer = trained(layers, 60)
        for at in range(runs):
            reporter = Reporter(service, trainer, run=f"m{at}")
            reporter.register()
            for frame in frames(trainer.steps):
                reporter.post(frame)

        text = asyncio.run(exporter.render(service, "1", layers=which))
        series = sum(not line.startswith(b"#") for line in text.splitlines())

        async def rendered() -> None:
            # Returning the text would cost as much as half of it: when asyncio.run() ends, signal
            # writes a word about its handler, which holds the task, which holds the result.
            await exporter.render(service, "1", layers=which)

        spent = cpu_us(lambda: asyncio.run(rendered()), calls=3)

        async def stalled() -> float:
            worst = 0.0

            async def ticking() -> None:
                nonlocal worst
                while True:
                    before = time.perf_counter()
                    await asyncio.sleep(0)
                    worst = max(worst, time.perf_counter() - before)

            ticker = asyncio.ensure_future(ticking())
            await asyncio.sleep(0.01)
            worst = 0.0
            await exporter.render(service, "1", layers=which)
            ticker.cancel()
            return worst

        stall = statistics.median(asyncio.run(stalled()) for _ in range(5))
    name = f"{runs} runs, {layers} layers, {which}"
    return name, f"{series:,}", f"{spent / 1000:.1f}", f"{stall * 1e3:.1f}"


def long_run(rows: int) -> tuple[str, ...]:
    with in_process() as service:
        place = service.store.run_directory("long") / "0000-i"
        place.mkdir(parents=True)
        each = 4096
        for number in range(rows // each):
            writer = SegmentWriter(place, "scalars", number)
            index = np.zeros(each, INDEX_DTYPE)
            index["step"] = np.arange(each) + number * each
            index["present"], index["loss"], index["grad_norm"] = 7, 2.0, 1.0
            for kind, payload in footer(index.tobytes(), writer.size):
                writer.append(kind, payload)
            writer.close()

        def once() -> object:
            return service.store.series.curves(
                place.parent, ("loss", "grad_norm"), None, None, 1500
            )

        return f"{rows:,}", f"{cpu_us(once, calls=1, rounds=5) / 1e6:.2f}"


def main() -> None:
    """Print the tables."""
    head = ("report", "kB", "CPU us", "reports/s/core", "p50 ms", "p99 ms")
    with serving() as process:
        rows = [one_trainer(process, layers, 1500) for layers in (0, 200, 2000)]
    print(table(f"One report (closed loop, {machine()})", rows, head))
    head = ("trainers", "reports/s", "of a core", "p50 ms", "p99 ms", "MB")
    rows = [many_trainers(1000, 200, 10, since) for since in (0, 100)]  # warming up, and warm
    print(table(f"Many trainers ({machine()})", rows, head))
    print(
        table(
            f"Resident memory with 100 runs ({machine()})",
            memory(100, 100_000),
            ("reports", "MB"),
        )
    )
    rows = [
        scrape(100, 20, exporter.Layers.TOP),
        scrape(5, 500, exporter.Layers.ALL),
    ]
    print(table(f"/metrics ({machine()})", rows, ("what", "series", "CPU ms", "stall ms")))
    rows = [long_run(2**20)]
    print(table(f"/series of a long run ({machine()})", rows, ("steps", "CPU s")))


if __name__ == "__main__":
    main()
