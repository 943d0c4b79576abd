"""Mixing probe: how much learned mixing of residual streams amplifies over all blocks.

    probe = MixingProbe(lambda: [block.mixing for block in model.blocks], every=10)
    probe.before_step(step); probe.scalars()["residual_mixing_forward"]

Models with hyper-connections keep several residual streams, and each block mixes them by a learned
matrix. What all of them do together is their product: its largest absolute row sum bounds what the
forward pass amplifies, its largest absolute column sum what the backward pass does. The user says
which matrices they are; nothing is recognised by its name or shape. Where they depend on the input,
the model keeps those of its last forward, averaged over the tokens, and the function returns these.

The function is called at the gate, without a graph, on sampled steps. The matrices go to the host
with everything else and are multiplied there, in float64.

Shapes:  [out, in] each, first block to last; the streams may grow or shrink in number.
Units:   gains, 1 is ideal.
Purity:  does not wait for the device. Every rank asks; the first one's numbers count.
Errors:  none comes out of before_step(): what the function raises, or returns that is no chain of
         plain matrices, becomes a blind spot and ends the signal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sentinel.core.advice import MIXING
from sentinel.core.detectors import depth
from sentinel_hooks.probes.probe import Float64, Quiet, Unseen

_PLAIN = (Tensor, nn.Parameter)


class MixingProbe(Quiet):
    """Asks `matrices` for the mixing matrices of all blocks."""

    def __init__(self, matrices: Callable[[], Sequence[Any]], every: int = 10) -> None:
        self._matrices = matrices
        self._every = every
        self._vectors: list[Tensor] = []
        self._shapes: list[tuple[int, int]] = []
        self._found: dict[str, float] = {}
        self._trouble = ""

    def before_step(self, step: int) -> None:
        """Ask, if this step is sampled."""
        self._vectors = []
        if step % self._every or self._trouble:
            return
        try:
            with torch.no_grad():
                self._take(list(self._matrices()))
        except Exception as error:  # noqa: BLE001  the user's function
            self._trouble = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if self._trouble:
            self._found = {}

    def _take(self, matrices: list[Any]) -> None:
        self._trouble = _wrong(matrices)
        if not self._trouble:
            self._shapes = [(int(m.shape[0]), int(m.shape[1])) for m in matrices]
            home = matrices[0].device
            flat = [m.detach().to(home, torch.float32).flatten() for m in matrices]
            self._vectors = [torch.cat(flat)]

    def pending(self) -> list[Tensor]:
        """All matrices, one behind the other."""
        return self._vectors

    def parts(self, values: Sequence[Float64]) -> dict[str, Float64]:
        """No columns; the product is taken here."""
        self._vectors = []
        for value in values:
            chain, at = [], 0
            for rows, columns in self._shapes:
                chain.append(value[at : at + rows * columns].reshape(rows, columns))
                at += rows * columns
            self._found = dict(zip(MIXING, depth.mixing_gain(chain), strict=True))
        return {}

    def scalars(self) -> dict[str, float]:
        """The newest sample."""
        return dict(self._found)

    def blind_spots(self) -> list[Unseen]:
        """What was wrong with the function, or with what it returned."""
        if not self._trouble:
            return []
        return [
            Unseen(
                f"residual mixing is not seen: {self._trouble}",
                "Signals(residual_mixing=...) takes a function that returns the mixing matrices "
                "[out, in] of all blocks, first to last; of sharded ones full_tensor()",
            )
        ]


def _wrong(matrices: list[Any]) -> str:
    """Why these are no chain of matrices, or ""."""
    if not matrices:
        return "the function returned no matrix"
    streams: int | None = None
    for i, matrix in enumerate(matrices):
        if type(matrix) not in _PLAIN or matrix.dim() != 2 or not matrix.numel():
            shape = tuple(getattr(matrix, "shape", ()))
            return f"item {i} is no plain matrix but a {type(matrix).__name__} of shape {shape}"
        if matrix.is_complex():
            return f"matrix {i} is complex, and only real ones are multiplied"
        if streams is not None and matrix.shape[1] != streams:
            return f"matrix {i} takes {matrix.shape[1]} streams, the one before it gives {streams}"
        streams = int(matrix.shape[0])
    return ""
