"""Self-check: in its first steps a session finds out whether it sees what it says it sees.

    check = SelfCheck(promised)
    check.copies(mine, all_of_them, whole)     several ranks: do the shares add up to one model?
    check.norms(probe.checked)                 norms against a plain float64 computation
    check.saw(loss=..., forward=..., columns=...)   at each of the first steps
    str(check)                                 for status() and the log

A check that fails changes nothing that is done: it is said in status(), logged once, and exported
as the metric self_check_failures. Before STEPS steps it is pending.

Purity:  pure; the probe does the measuring (probes/grads.py), once, on some of the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from sentinel.core.types import (
    LAYER_ACTIVATION_RMS,
    LAYER_ATTENTION_MAX_LOGIT,
    LAYER_GRAD_NORM,
)
from sentinel_hooks.signals import Signals

logger = logging.getLogger(__name__)

STEPS = 5  # looked at before the verdict
TOLERANCE = 1e-3  # relative; float32 sums of a hundred million squares stay within it
BF16_TOLERANCE = 2e-2
TINY = 1e-12  # below it a norm is 0 to any optimizer, and its squares vanish in float32


class SelfCheck:
    """What was promised, and what was seen of it."""

    def __init__(self, run: str, signals: Signals, *, blocks: int, attention: int) -> None:
        """Nothing was seen yet.

        Args:
            blocks, attention: how many modules of the kind the probes have found.
        """
        self._run = run
        self._promised = {LAYER_GRAD_NORM} if signals.layer_grad_norm else set()
        if signals.activations and blocks:
            self._promised.add(LAYER_ACTIVATION_RMS)
        if signals.attention and attention:
            self._promised.add(LAYER_ATTENTION_MAX_LOGIT)
        self._seen: set[str] = set()
        self._loss = self._forward = False
        self._steps = 0
        self._passed: list[str] = []
        self.compared = False  # norms
        self.failures: list[str] = []

    @property
    def done(self) -> bool:
        """There is a verdict."""
        return self._steps >= STEPS

    def copies(self, counted: float, whole: int, ranks: int) -> None:
        """Several ranks: `counted` elements, all shares added up, of a model that has `whole`."""
        if abs(counted - whole) <= 0.5:
            self._passed.append(f"the shares of {ranks} ranks add up to one model")
        else:
            self.failures.append(
                f"the shares of {ranks} ranks add up to {counted:,.0f} elements of a model of "
                f"{whole:,}: the gradient norm is not to be trusted"
            )

    def norms(self, checked: Iterable[tuple[float, float, bool]]) -> None:
        """(ours, plain float64, narrow) of single tensors; narrow: 16-bit gradients."""
        worst, count = 0.0, 0
        for ours, plain, narrow in checked:
            count += 1
            if ours - ours != 0 or plain - plain != 0:
                continue  # not finite: both say so, or the step is none to judge by
            off = abs(ours - plain) / max(plain, TINY)
            bound = BF16_TOLERANCE if narrow else TOLERANCE
            worst = max(worst, off * TOLERANCE / bound)
        if not count or self.compared:
            return
        self.compared = True
        if worst <= TOLERANCE:
            self._passed.append(f"norms of {count} tensors equal a plain float64 sum")
        else:
            self.failures.append(
                f"norms differ from a plain float64 sum by {worst:.1%} (of {count} tensors)"
            )

    def saw(self, *, loss: bool, forward: bool, columns: Collection[str]) -> bool:
        """One of the first steps; True when this one brought the verdict."""
        if self.done:
            return False
        self._loss = self._loss or loss
        self._forward = self._forward or forward
        self._seen.update(columns)
        self._steps += 1
        if self._steps < STEPS:
            return False
        for name, seen in (("the loss", self._loss), ("the forward", self._forward)):
            (self._passed if seen else self.failures).append(
                f"{name} is seen" if seen else f"{name} was not seen in {STEPS} steps"
            )
        for name in sorted(self._promised):
            if name in self._seen:
                self._passed.append(f"{name} is measured")
            else:
                self.failures.append(f"{name} was not measured in {STEPS} steps")
        say = logger.warning if self.failures else logger.info
        say("self-check run=%s %s", self._run, self)
        return True

    def __str__(self) -> str:
        if not self.done:
            return f"pending, after {STEPS} steps"
        if self.failures:
            return f"failed: {'; '.join(self.failures)}"
        return f"passed: {'; '.join(self._passed)}"
