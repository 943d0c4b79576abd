"""All probes of a run as one, so that the session knows of one.

    probes = Probes.of(signals, target, table, threshold=50.0, clock=time.perf_counter, guard=guard)
    probes.attach()
    probes.before_step(step); vectors = probes.pending()      read with the norms and the loss
    columns = probes.resolve(values)                          or parts(), reduce, finish()
    probes.after_step(applied)

A probe that fails is switched off by itself, the others go on, and blind_spots() names it.

Errors:  none comes out: each call into a probe runs under the guard, at the place "probe NAME".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor, nn

from sentinel.core.types import Column
from sentinel_hooks.guard import Guard
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.activations import ActivationProbe
from sentinel_hooks.probes.attention import AttentionProbe
from sentinel_hooks.probes.clipping import ClipProbe
from sentinel_hooks.probes.grads import ROWS
from sentinel_hooks.probes.memory import MemoryProbe
from sentinel_hooks.probes.mixing import MixingProbe
from sentinel_hooks.probes.pace import PaceProbe
from sentinel_hooks.probes.probe import Combine, Float64, Parts, Probe, Quiet, Unseen
from sentinel_hooks.probes.updates import UpdateProbe
from sentinel_hooks.signals import Signals
from sentinel_hooks.target import Target

_P = ParamSpec("_P")
_R = TypeVar("_R")


_KINDS: dict[str, type[Quiet]] = {
    "attention": AttentionProbe,
    "activations": ActivationProbe,
    "update_ratio": UpdateProbe,
    "clip_pressure": ClipProbe,
    "memory": MemoryProbe,
    "pace": PaceProbe,
    "residual_mixing": MixingProbe,
}


def part_names(signals: Signals) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parts that add up over ranks, and parts of which the largest counts, by name."""
    chosen = [kind.combine for name, kind in _KINDS.items() if getattr(signals, name)]
    named = {name: combine for each in chosen for name, combine in each.items()}
    if signals.layer_grad_norm:
        named[ROWS] = Combine.SUM
    sums = tuple(sorted(n for n, c in named.items() if c is Combine.SUM))
    return sums, tuple(sorted(n for n, c in named.items() if c is Combine.MAX))


class Probes:
    """The probes that `signals` asks for.

    Attributes:
        clip, memory, pace: those that the seams tell something, or None.
    """

    def __init__(self, probes: Mapping[str, Probe], guard: Guard) -> None:
        self._probes = dict(probes)
        self._guard = guard
        self._dead: dict[str, str] = {}
        self._sizes: list[tuple[str, int]] = []
        self._speakers: dict[str, list[tuple[str, Probe]]] = {}
        clip, memory, pace = (probes.get(n) for n in ("clip_pressure", "memory", "pace"))
        self.clip = clip if isinstance(clip, ClipProbe) else None
        self.memory = memory if isinstance(memory, MemoryProbe) else None
        self.pace = pace if isinstance(pace, PaceProbe) else None

    @classmethod
    def of(
        cls,
        signals: Signals,
        target: Target,
        table: LayerTable,
        *,
        threshold: float,
        clock: Callable[[], float],
        guard: Guard,
        share: Callable[[nn.Parameter], float] | None = None,
    ) -> Probes:
        """Those of `signals`; `threshold` is the policy's for attention logits."""
        models, optimizers, every = target.models, target.optimizers, signals.every
        made: dict[str, Probe] = {}
        if signals.attention:
            made["attention"] = AttentionProbe(models, table, threshold)
        if signals.activations:
            made["activations"] = ActivationProbe(models, table, every)
        if signals.update_ratio:
            made["update_ratio"] = UpdateProbe(optimizers, table, every, share)
        if signals.clip_pressure:
            made["clip_pressure"] = ClipProbe()
        if signals.memory:
            made["memory"] = MemoryProbe(models, optimizers, every)
        if signals.pace:
            made["pace"] = PaceProbe(clock, models)
        if signals.residual_mixing is not None:
            made["residual_mixing"] = MixingProbe(signals.residual_mixing, every)
        return cls(made, guard)

    @property
    def found(self) -> dict[str, int]:
        """How many modules the probes watch."""
        watched = {
            "blocks": self._probes.get("activations"),
            "attention": self._probes.get("attention"),
        }
        return {n: len(getattr(p, "watched", ())) for n, p in watched.items()}

    @property
    def combine(self) -> dict[str, Combine]:
        """Of all parts."""
        return {n: c for probe in self._probes.values() for n, c in probe.combine.items()}

    def attach(self) -> None:
        """Put all hooks in."""
        for name, probe in list(self._probes.items()):
            self._run(name, probe.attach)

    def detach(self) -> None:
        """Take all hooks out."""
        for name, probe in list(self._probes.items()):
            self._run(name, probe.detach)

    def before_step(self, step: int) -> None:
        """At the gate, before the read."""
        for name, probe in self._that("before_step"):
            self._run(name, probe.before_step, step)

    def after_step(self, applied: bool) -> None:
        """After the optimizer's step."""
        for name, probe in self._that("after_step"):
            self._run(name, probe.after_step, applied)

    def pending(self) -> list[Tensor]:
        """What the one read of the step shall bring."""
        vectors: list[Tensor] = []
        self._sizes = []
        for name, probe in self._that("pending"):
            own = self._run(name, probe.pending) or []
            self._sizes.append((name, len(own)))
            vectors += own
        return vectors

    def parts(self, values: Sequence[Float64]) -> dict[str, Float64]:
        """This rank's numbers, from the values of pending() in its order."""
        parts: dict[str, Float64] = {}
        start = 0
        for name, size in self._sizes:
            own, start = values[start : start + size], start + size
            probe = self._probes.get(name)
            if probe is not None:
                parts |= self._run(name, probe.parts, own) or {}
        return parts

    def finish(self, parts: Parts) -> dict[str, Column]:
        """Columns, from the parts of all ranks."""
        columns: dict[str, Column] = {}
        for name, probe in self._that("finish"):
            columns |= self._run(name, probe.finish, parts) or {}
        return columns

    def resolve(self, values: Sequence[Float64]) -> dict[str, Column]:
        """Columns of a single process."""
        return self.finish(self.parts(values))

    def scalars(self) -> dict[str, float]:
        """Numbers without layers, by metric name; "name/label" where there are several."""
        found: dict[str, float] = {}
        for name, probe in self._that("scalars"):
            found |= self._run(name, probe.scalars) or {}
        return found

    def blind_spots(self) -> list[Unseen]:
        """What is not seen, and the way out."""
        spots = [
            Unseen(
                f"the signal {name} was switched off, it failed inside: {why}",
                f"please report it; Signals({name}=False) leaves it out",
            )
            for name, why in self._dead.items()
        ]
        for name, probe in list(self._probes.items()):
            spots += self._run(name, probe.blind_spots) or []
        return spots

    def notes(self) -> list[str]:
        """What the probes have settled by themselves."""
        notes: list[str] = []
        for name, probe in self._that("notes"):
            notes += self._run(name, probe.notes) or []
        return notes

    def _that(self, method: str) -> list[tuple[str, Probe]]:
        """The probes that do something there: most have nothing to do at most moments of a step."""
        speakers = self._speakers.get(method)
        if speakers is None:
            idle = getattr(Quiet, method)
            speakers = [
                (name, probe)
                for name, probe in self._probes.items()
                if getattr(type(probe), method, None) is not idle
            ]
            self._speakers[method] = speakers
        return speakers

    def _run(
        self, name: str, body: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R | None:
        where = f"probe {name}"
        failures = self._guard.counts.get(where, 0)
        result = self._guard.run(where, body, *args, **kwargs)
        if self._guard.counts.get(where, 0) > failures and name not in self._dead:
            self._dead[name] = self._guard.last
            probe = self._probes.pop(name, None)
            self._speakers = {}
            if probe is not None:
                self._guard.run(where, probe.detach)
        return result
