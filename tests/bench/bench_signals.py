"""What the signals cost a training step, measured where they are taken, and beside other tools.

    python -m tests.bench signals

For each model (loop.py), in one process:

* Budgets: norms, activations and attention in every step; and everything, with the heavy signals
  in every tenth step and the record written to disk. Timed in place; the bare step is the rest of
  the same step. Heavy signals come every 4th step here, and the medians of the steps with them, of
  those after them and of the others are weighed 1 : 1 : 8.
* Reads of the device in a step, counted; bytes that the signals hold when they hold most.
* One probe after the other.
* Other tools (peers.py), as whole steps: they cannot be timed in place.

Medians of ratios. Hooks are charged for the detour that torch takes through a module that has any,
and what the clock itself costs is taken off.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sentinel_hooks import observe
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.activations import ActivationProbe
from sentinel_hooks.probes.attention import AttentionProbe
from sentinel_hooks.probes.memory import MemoryProbe
from sentinel_hooks.probes.probe import Probe, resolve
from sentinel_hooks.probes.read import read
from sentinel_hooks.probes.updates import UpdateProbe
from tests.bench import peers
from tests.bench.loop import ALL, EVERY, MODELS, TENTH, THREE, Gpt, Loop, Make, Parts, many_tensors
from tests.bench.loop import Meter as Meter
from tests.bench.loop import clock_ns as clock_ns
from tests.bench.loop import dispatch_ns as dispatch_ns
from tests.bench.loop import watched_hooks as watched_hooks
from tests.bench.timing import machine, table

WARM = 4  # steps: the attention probe's hooks have settled, the optimizer's state is there

# ---------------------------------------------------------------- budgets


def weighed(steps: list[tuple[int, float]]) -> float:
    """The median step's figure, as if heavy signals came every tenth step."""
    kinds: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for attempt, value in steps:
        kinds[min(attempt % EVERY, 2)].append(value)
    sampled, after, other = (statistics.median(kinds[k]) for k in (0, 1, 2))
    return (sampled + after + (TENTH - 2) * other) / TENTH


def budgets(make: Make, rounds: int) -> list[tuple[str, ...]]:
    """Rows: what, us, % of the bare step."""
    # After another loop's step thousands of small objects are out of the cache, which they are not
    # for a model that has its process to itself. (3 and EVERY have no common factor.)
    turn = 3 if make is many_tensors else 1
    loops = {"bare": Loop(make), "three": Loop(make, THREE), "all": Loop(make, ALL)}
    found: dict[str, list[tuple[int, float]]] = {}
    bare: list[float] = []
    rounds = max(rounds, EVERY)  # all of its kinds of steps
    for round_ in range(WARM + rounds):
        order = list(loops)
        random.Random(round_).shuffle(order)
        attempts: dict[str, int] = {}
        parts: dict[str, Parts] = {}
        for name in order:
            for _ in range(turn):  # the last counts
                attempts[name] = loops[name].attempt
                parts[name] = loops[name].step()
        if round_ < WARM:
            continue
        step = statistics.mean(p["bare"] for p in parts.values())
        bare.append(step)
        three, everything, free = parts["three"], parts["all"], parts["bare"]
        for name, key, value in (
            ("limit: one pass over as many bytes", "bare", free["flat"]),
            ("norms + activations + attention", "three", three["gate"] + three["hooks"]),
            ("... of which hooks in the forward", "three", three["hooks"]),
            ("everything, to disk", "all", everything["ours"]),
            ("... of which at the gate", "all", everything["gate"]),
            ("... hooks in the forward", "all", everything["hooks"]),
            ("... marks, safe point, record", "all", everything["around"]),
        ):
            found.setdefault(name, []).append((attempts[key], 100 * value / step))
    middle = statistics.median(bare)
    rows = [("bare step", f"{middle * 1000:.0f}", "100")]
    for name, steps in found.items():
        share = weighed(steps)
        rows.append((name, f"{share * middle * 10:.0f}", f"{share:.2f}"))
    rows += [(name, value, "") for name, value in _reads(loops["all"])]
    rows += [(name, value, "") for name, value in _held(loops["all"])]
    for loop in loops.values():
        loop.close()
    return rows


# ---------------------------------------------------------------- reads and bytes

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
}


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that make the host wait for the device; ours in one read() are one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ours = 0
        self.others: dict[str, int] = {}
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not self._inside:
            self.note(func.__name__)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        """One more, outside of read()."""
        if not self._inside:
            self.others[name] = self.others.get(name, 0) + 1

    def counted(self, *args: Any) -> Any:
        """In place of read()."""
        self.ours += 1
        self._inside = True
        try:
            return read(*args)
        finally:
            self._inside = False


def _reads(loop: Loop) -> list[tuple[str, str]]:
    """Over EVERY steps: the gate alone, less the optimizer's own step."""
    reads = Reads()
    stock = {name: getattr(Tensor, name) for name in ("numpy", "tolist")}

    def spy(name: str) -> Callable[..., Any]:
        def run(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads.note(name)
            return stock[name](self, *args, **kwargs)

        return run

    session = loop.session
    before, forward = session.before_step, session.on_forward

    def under(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with reads:
                return call(*args, **kwargs)

        return run

    session.before_step, session.on_forward = under(before), under(forward)
    observe.read = reads.counted
    for name in stock:
        setattr(Tensor, name, spy(name))
    try:
        for _ in range(EVERY):
            loop.step()
    finally:
        for name, original in stock.items():
            setattr(Tensor, name, original)
        observe.read = read
        session.before_step, session.on_forward = before, forward
    other = ", ".join(f"{n} {k}" for k, n in reads.others.items()) or "none"
    return [(f"reads of the device in {EVERY} steps, and others", f"{reads.ours}, {other}")]


def _held(loop: Loop) -> list[tuple[str, str]]:
    """Bytes of tensors that the probes hold, beyond what the loop itself holds then."""
    most = {False: 0, True: 0}
    model, optimizer = loop.model, loop.optimizer
    session = loop.session

    def look(sampled: bool) -> None:
        users = [*model.parameters(), *model.buffers()]
        users += [p.grad for p in model.parameters() if p.grad is not None]
        users += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        known = {t.untyped_storage().data_ptr() for t in users}
        roots = [*loop.probes.values(), session._observer.probe, session._running]
        found = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in _tensors(roots, set())
        }
        size = sum(n for where, n in found.items() if where not in known)
        most[sampled] = max(most[sampled], size)

    after = session.after_step

    def at_end(*args: Any) -> Any:
        look((loop.attempt % EVERY) == 0)  # the copy of the weights is there
        return after(*args)

    session.after_step = at_end
    try:
        for _ in range(2 * EVERY):
            loop.step(look=lambda: look(False))
    finally:
        session.after_step = after
    return [
        ("bytes held, most in a step without heavy signals", f"{most[False]:,}"),
        ("... with them: the copy of the weights is there", f"{most[True]:,}"),
    ]


def _tensors(things: Iterable[Any], seen: set[int]) -> Iterator[Tensor]:
    for thing in things:
        if id(thing) in seen or isinstance(thing, nn.Module | torch.optim.Optimizer | type):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, dict):
            yield from _tensors(list(thing.values()), seen)
        elif isinstance(thing, list | tuple | set):
            yield from _tensors(list(thing), seen)
        elif type(thing).__module__.startswith("sentinel"):
            slots = [n for c in type(thing).__mro__ for n in getattr(c, "__slots__", ())]
            inner = [getattr(thing, n, None) for n in slots]
            yield from _tensors([*inner, *getattr(thing, "__dict__", {}).values()], seen)


# ---------------------------------------------------------------- one probe after the other

Made = Callable[[Gpt, LayerTable, torch.optim.Optimizer], Probe]


def measure(make: Make, made: Made, sampled: bool, rounds: int) -> tuple[float, float, float]:
    """(microseconds of the probe, % of the rest of the step, milliseconds of that)."""
    torch.manual_seed(0)
    model, ids = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    probe = made(model, LayerTable.of([model]), optimizer)
    per_call, per_module = clock_ns(), dispatch_ns()
    probe.attach()
    cost, share, bare = [], [], []
    for t in range(WARM + rounds):
        meter = Meter()
        step = 0 if sampled else 10 * t + 1
        optimizer.zero_grad()
        with watched_hooks(meter):
            start = time.process_time_ns()
            model(ids).backward()
            rest = time.process_time_ns() - start
        hooked = sum(bool(m._forward_hooks) for m in model.modules())
        rest -= meter.spent
        own = meter.take(per_call) + hooked * per_module
        start = time.process_time_ns()
        probe.before_step(step)
        resolve(probe, read(probe.pending(), [])[0])
        own += time.process_time_ns() - start
        start = time.process_time_ns()
        optimizer.step()
        rest += time.process_time_ns() - start
        start = time.process_time_ns()
        probe.after_step(True)
        own += time.process_time_ns() - start
        if t >= WARM:
            cost.append(own / 1e3)
            share.append(100 * own / rest)
            bare.append(rest / 1e6)
    probe.detach()
    return statistics.median(cost), statistics.median(share), statistics.median(bare)


PROBES: tuple[tuple[str, Made, bool], ...] = (
    ("attention, every step", lambda m, t, o: AttentionProbe([m], t), False),
    ("... with every layer near the threshold", lambda m, t, o: AttentionProbe([m], t, 0.0), False),
    ("activations, every step", lambda m, t, o: ActivationProbe([m], t), False),
    ("update ratio, a sampled step", lambda m, t, o: UpdateProbe([o], t), True),
    ("memory, a sampled step", lambda m, t, o: MemoryProbe([m], [o]), True),
)


def one_by_one(make: Make, rounds: int) -> list[tuple[str, ...]]:
    """Rows: signal, us, % of the bare step, % where it comes every tenth."""
    rows: list[tuple[str, ...]] = []
    for name, made, sampled in PROBES:
        cost, share, _ = measure(make, made, sampled, rounds)
        amortised = f"{share / TENTH:.2f}" if sampled else f"{share:.2f}"
        rows.append((name, f"{cost:.0f}", f"{share:.2f}", amortised))
    return rows


def main() -> None:
    torch.set_num_threads(1)
    for title, make, rounds in MODELS:
        at = machine().partition(";")[0]
        head = f"{title} ({at}; CPU time, medians)"
        print(table(head, budgets(make, rounds), ("what", "us", "% of the bare step")))
        if make is MODELS[1][1]:
            continue  # the same model as the first: its probes and peers cost the same time
        rows = one_by_one(make, rounds)
        print(table(title, rows, ("signal", "us", "% of the bare step", "% every 10th")))
        print(peers.report(title, make, 2 + rounds // 3))


if __name__ == "__main__":
    main()
