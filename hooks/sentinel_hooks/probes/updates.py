"""Update probe: how far a step moves each layer, as a share of its weights, every `every` steps.

    probe = UpdateProbe(optimizers, table, every=10)
    probe.before_step(step); optimizer.step(); probe.after_step(applied=True)
    ... at the next gate: values = read(probe.pending(), [])[0]; columns = resolve(probe, values)

The weights are copied before a sampled step and subtracted after it: exact for every optimizer,
which what can be computed from Adam's state is not, and cheaper than that. The copy is freed before
the next forward begins. The numbers are read with those of the following step, so that nothing
waits for the device: the ratio that stands beside the loss of step t is that of the update before.

A step that was held back, or that nothing moved, has no ratio. A layer whose parameters no
optimizer holds has none either; one that is held and did not move (a rate of 0) has 0. Weights that
were exactly 0 (adapters, projections that start at zero) have none for the next 100 steps: until
then they are the sum of a few updates, and move by large shares of themselves in perfect health.
So do weights that start next to 0, as LayerScale does: those whose RMS is at first below 1/100 of
the median of all layers have none for the first 100 steps that they are watched.
Complex parameters count with their magnitudes; whole numbers are no parameters that step.

Shapes:  columns float32 [L].
Units:   ratio of L2 norms, dimensionless; about 1e-3 when healthy.
Memory:  one more copy of the weights, from a sampled gate to the end of its step.
Purity:  does not wait for the device.
Errors:  out of memory ends the sampling, and blind_spots() says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sentinel.core.types import LAYER_UPDATE_RATIO, LAYER_WEIGHT_NORM, NOT_MEASURED, Column
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes.packing import SMALL, Packing
from sentinel_hooks.probes.probe import Combine, Float64, Parts, Quiet, Unseen, column

GROWING = 100  # steps in which weights that were 0, or next to it, have no ratio
TINY = 100.0  # below the median RMS of all layers: LayerScale's 1e-4 is, an init of 0.02 is not
UPDATE, WEIGHT, HELD = "update_squares", "weight_squares", "weight_held"


class UpdateProbe(Quiet):
    """Watches the parameters of `optimizers`."""

    combine: Mapping[str, Combine] = {
        UPDATE: Combine.SUM,
        WEIGHT: Combine.SUM,
        HELD: Combine.MAX,
    }

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        table: LayerTable,
        every: int = 10,
        share: Callable[[nn.Parameter], float] | None = None,
    ) -> None:
        """Sample every `every` steps.

        Args:
            share: what a parameter's squares count on this rank: 1 / world where it is a replica,
                so that sums over the ranks are those of one copy; None: 1.
        """
        self._optimizers = tuple(optimizers)
        self._table = table
        self._every = every
        self._share = share
        self._parameters: list[nn.Parameter] = []
        self._sharded = False
        self._rows = np.empty(0, np.intp)
        self._shares = np.empty(0)
        self._packing = Packing([])
        self._before: list[list[Tensor]] = []
        self._weights: list[Tensor] = []
        self._ready: list[tuple[Tensor, Any]] = []
        self._reading: list[tuple[Tensor, Any]] = []
        self._trouble = ""
        self._step = 0
        self._grown = np.zeros(len(table), np.intp)  # the step from which a row has a ratio
        self._known = np.zeros(len(table), bool)  # rows whose start was seen
        self._elements = np.array([layer.parameters for layer in table.layers], float)

    def before_step(self, step: int) -> None:
        """Copy the weights, if this step is sampled."""
        self._step = step
        self._reading, self._ready = self._ready, []
        self._before, self._weights = [], []
        if step % self._every or self._trouble:
            return
        try:
            self._refresh()
            self._before, self._weights = self._packing.copies(self._live())
        except RuntimeError as error:  # out of memory is one
            self._give_up(error)

    def after_step(self, applied: bool) -> None:
        """Subtract, and keep the norms for the next read."""
        before, self._before = self._before, []
        weights, self._weights = self._weights, []
        if not applied:
            self._ready = []  # with late reads it was taken for applied at first
            return
        if not before:
            return
        try:
            moved = self._packing.subtract(before, self._live())
            for update, weight, places in zip(moved, weights, self._packing.places, strict=True):
                self._ready.append((torch.cat((update, weight)), places))
        except RuntimeError as error:
            self._ready = []
            self._give_up(error)

    def detach(self) -> None:
        """Let go of copies."""
        self._before, self._weights, self._ready, self._reading = [], [], [], []

    def pending(self) -> list[Tensor]:
        """Norms of the last sampled update and of the weights before it."""
        return [vector for vector, _ in self._reading]

    def parts(self, values: Sequence[Float64]) -> dict[str, Float64]:
        """Squares of each row."""
        if not values:
            return {}
        L = len(self._table)
        update, weight = np.zeros(L + 1), np.zeros(L + 1)
        held = np.full(L + 1, NOT_MEASURED)
        for (_, chosen), value in zip(self._reading, values, strict=True):
            moved, size = value.reshape(2, -1)
            rows, share = self._rows[chosen], self._shares[chosen]
            np.add.at(update, rows, np.square(moved) * share)
            np.add.at(weight, rows, np.square(size) * share)
            held[rows] = 1.0
        self._reading = []
        return {UPDATE: update[:-1], WEIGHT: weight[:-1], HELD: held[:-1]}

    def finish(self, parts: Parts) -> dict[str, Column]:
        """Ratio and weight norm; weights that were 0, or next to it, have no ratio at first."""
        if UPDATE not in parts:
            return {}
        held, weight = parts[HELD] == 1.0, np.sqrt(parts[WEIGHT])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.sqrt(parts[UPDATE]) / weight
        growing = held & (weight == 0.0)
        if not self._known[held].all():
            growing |= held & ~self._known & self._tiny(weight, held)
            self._known |= held
        self._grown[growing] = self._step + GROWING
        ratio = np.where(held & (self._grown <= self._step), ratio, NOT_MEASURED)
        columns = {}
        for name, values in (
            (LAYER_UPDATE_RATIO, ratio),
            (LAYER_WEIGHT_NORM, np.where(held, weight, NOT_MEASURED)),
        ):
            found = column(values)
            if found is not None:
                columns[name] = found
        return columns

    def _tiny(self, weight: Float64, held: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Rows of elements far smaller than those of the others."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rms = weight / np.sqrt(self._elements)  # a lazy layer has no elements yet: inf or nan
        usual = rms[held & np.isfinite(rms) & (rms > 0.0)]
        if not usual.size:
            return np.zeros(len(rms), bool)
        tiny: npt.NDArray[np.bool_] = rms * TINY < np.median(usual)
        return tiny

    def blind_spots(self) -> list[Unseen]:
        """Sampling was given up."""
        if not self._trouble:
            return []
        return [
            Unseen(
                f"update-to-weight ratios are not measured: {self._trouble}",
                "they need one more copy of the weights in sampled steps; "
                "Signals(update_ratio=False) leaves them out",
            )
        ]

    def _give_up(self, error: Exception) -> None:
        self._trouble = str(error).partition("\n")[0]
        self._before, self._weights = [], []

    def _live(self) -> list[Tensor]:
        """The parameters as they lie on this rank; a sharded one is its shard."""
        if not self._sharded:
            return list(self._parameters)
        return [p.to_local().detach() if hasattr(p, "to_local") else p for p in self._parameters]

    def _refresh(self) -> None:
        found: list[nn.Parameter] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found += [
                    p
                    for p in group["params"]
                    if p.requires_grad
                    and not nn.parameter.is_lazy(p)
                    and (p.is_floating_point() or p.is_complex())
                ]
        # Beside others, what lies on the meta device has no numbers, and reading them would raise.
        found = [p for p in found if p.device.type != "meta"] or found
        if len(found) == len(self._parameters) and all(
            a is b for a, b in zip(found, self._parameters, strict=True)
        ):
            return
        self._parameters = list({id(p): p for p in found}.values())
        self._sharded = any(hasattr(p, "to_local") for p in self._parameters)
        plain = all(type(p) in (Tensor, nn.Parameter) for p in self._parameters)
        with torch.no_grad():
            self._packing = Packing(self._live(), SMALL if plain else 0)
        rows = self._table.index(self._parameters)
        rows[rows < 0] = len(self._table)
        self._rows = rows
        share = self._share
        self._shares = np.array([1.0 if share is None else share(p) for p in self._parameters])
