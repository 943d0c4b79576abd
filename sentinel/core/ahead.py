"""Before a step is measured: within which limits will it be let through?

    ahead = Ahead(policy)
    limits = ahead.limits(state, loss=True)
    limits.holds(norm, loss)                     what decide() will say, for finite and other values

With these numbers a device can decide for itself whether its optimizer steps, and nobody has to
wait for what it measured: the observation is read one step later, and decide() then says of it
what the device has done. That holds for the plain case only: a calm run, in which every fault
ends in a skip. Whatever else can happen (a rung of the ladder, the canary's question, a snapshot
after the step) needs the observation at once, and `limits.read_now` says so.

The limits are exact: they are the largest floats for which decide() lets the step through, found
by bisection on the very expressions that the detectors use. Which faults end in a skip is asked of
rules.plan(), with one reading of each kind.

Units:   norm as measured; loss [nats/token].
Purity:  no clock, no I/O, no randomness. Ahead remembers plan()'s answers for a state that nothing
         but the policy decides; equal inputs give equal outputs.
Errors:  none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sentinel.core import engine
from sentinel.core.advice import AdviceState, Advised
from sentinel.core.detectors import grad_norm, level_shift, spike
from sentinel.core.detectors.level_shift import ShiftReading, ShiftState
from sentinel.core.detectors.spike import SpikeReading, SpikeState
from sentinel.core.judge import Judged
from sentinel.core.policy import CanaryMode, Policy
from sentinel.core.rules import memory, plan
from sentinel.core.state import State
from sentinel.core.types import Action, Mode, Observation, Reading, Status, Verdict
from sentinel.core.windows import LARGEST

_SKIPS = ("nonfinite_grad", "grad_norm", "loss_outlier")
_NO_ADVICE = Advised()


@dataclass(frozen=True, slots=True)
class Limits:
    """A step is let through if norm <= `norm`, loss <= `loss`, and one of the last two holds.

    A value that is not finite is over every limit. LARGEST: there is no other limit.

    Attributes:
        read_now: why the step must be measured before it is decided; "" when it need not be.
        held: what is over a limit is skipped; False: nothing is (mode observe).
        norm_with_loss, loss_with_norm: over both: a spike step too, at a lower loss.
        lr_factor: of this step, as Decision.lr_factor.
    """

    read_now: str = ""
    held: bool = True
    norm: float = LARGEST
    loss: float = LARGEST
    norm_with_loss: float = LARGEST
    loss_with_norm: float = LARGEST
    lr_factor: float = 1.0

    def holds(self, norm: float | None, loss: float | None) -> bool:
        """The step would not be let through; None: not measured."""
        n, x = (0.0 if v is None else v for v in (norm, loss))
        fine = n <= self.norm and x <= self.loss
        fine = fine and (n <= self.norm_with_loss or x <= self.loss_with_norm)
        finite = not (math.isinf(n) or math.isinf(x))
        return self.held and not (fine and finite)


class Ahead:
    """One policy's limits."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[tuple[object, ...], tuple[bool, ...] | None] = {}
        rules = policy.rules
        # At the very step at which these rules count to their end, the canary is asked.
        asked = policy.canary.mode is CanaryMode.ON and any(
            rule.mode is not Mode.OFF and rule.for_steps == 1
            for rule in (rules.loss_spike, rules.nonfinite_loss)
        )
        self._always = "the policy climbs the ladder at the first bad step" if asked else ""

    def limits(self, state: State, *, loss: bool = True, snapshots: bool = True) -> Limits:
        """Those of the step that comes next.

        Args:
            loss: its loss will be measured. Its norm always is.
            snapshots: one that is due after this step would really be taken.
        """
        policy, ledger, stats = self._policy, state.ledger, state.stats
        if self._always:
            return Limits(self._always)
        if (
            ledger.spike_count
            or ledger.nonfinite_run
            or ledger.skip_run
            or ledger.shield
            or ledger.verdict is not Verdict.NONE
            or ledger.pending_restore is not None
            or stats.spike.hot
        ):
            return Limits("trouble")
        if snapshots and engine.snapshot_due(state):
            return Limits("a snapshot follows")
        verdicts = self._verdicts(state)
        if verdicts is None:
            return Limits("more than a skip may follow")
        any_skip, by_norm, by_loss = verdicts
        factor = engine.lr_factor(ledger.lr)
        if ledger.manual_lr != 1.0:
            factor *= ledger.manual_lr
        if not any_skip:
            return Limits(held=False, lr_factor=factor)
        norm = grad_norm.limit(stats.norm, policy.grad_norm) if by_norm else LARGEST
        if not (loss and by_loss):
            return Limits(norm=norm, lr_factor=factor)
        bounds = spike.limits(stats.spike, policy.spike)
        if level_shift.may_be_away(stats.shift, bounds.sigma, policy.level_shift):
            return Limits("the loss has crept away")
        return Limits(
            "", True, norm, bounds.loss, bounds.norm_with_loss, bounds.loss_with_norm, factor
        )

    def _verdicts(self, state: State) -> tuple[bool, ...] | None:
        """Whether anything is skipped, and whether norm and loss are; None: it is not so plain."""
        ledger, policy = state.ledger, self._policy
        windowed = sum(1 for s in ledger.skips if s > state.step - policy.skip.window)
        past = [memory(ledger, name) for name in _SKIPS]
        key: tuple[object, ...] | None = None
        if ledger.last_rollback is None and not ledger.rollbacks and not any(m.acted for m in past):
            key = (
                windowed >= policy.skip.in_window,
                ledger.stopped,
                ledger.automation,
                past[1].run,
                bool(ledger.snapshots) and any(s.healthy for s in ledger.snapshots),
            )
            if key in self._known:
                return self._known[key]
        found = self._ask(state)
        if key is not None:
            self._known[key] = found
        return found

    def _ask(self, state: State) -> tuple[bool, ...] | None:
        """Ask the rules about one step of each kind."""
        table: dict[tuple[str, str], bool] = {}
        for loss in _LOSSES:
            for norm in _NORMS:
                made = plan(
                    state, _observation(state.step, loss, norm), _JUDGED[loss, norm], self._policy
                )
                if made.action > Action.SKIP_STEP or made.accept_level or made.no_target:
                    return None
                if made.would > Action.SKIP_STEP or made.spent:
                    return None
                table[loss, norm] = made.action is Action.SKIP_STEP
        if not any(table.values()):
            return False, False, False
        if table["calm", "calm"]:
            return None
        if not all(held for kinds, held in table.items() if "bad" in kinds):
            return None
        by_norm, by_loss = table["calm", "far"], table["far", "calm"]
        if table["far", "far"] is not (by_norm or by_loss):
            return None
        return True, by_norm, by_loss


# ---------------------------------------------------------------- one reading of each kind

_LOSSES = _NORMS = ("calm", "far", "bad")
_VALUE = {"calm": 1.0, "far": 1e6, "bad": math.nan}


def _observation(step: int, loss: str, norm: str) -> Observation:
    return Observation(step, loss=_VALUE[loss], grad_norm=_VALUE[norm])


def _judged(loss: str, norm: str) -> Judged:
    nonfinite = tuple(n for n, kind in (("loss", loss), ("grad", norm)) if kind == "bad")
    hot = loss != "calm"
    level = 3 if nonfinite else int(hot)
    status = {"calm": Status.NORMAL, "far": Status.SPIKE, "bad": Status.NONFINITE}[norm]
    return Judged(
        SpikeState(),
        SpikeReading(Status.SPIKE if hot else Status.NORMAL, 10.0, 1.0, level, hot, 1.0),
        ShiftState(),
        ShiftReading(0.0, False),
        Reading(status, _VALUE[norm], 1.0, _VALUE[norm]),
        nonfinite,
        (),
        (),
        None,
        AdviceState(),
        _NO_ADVICE,
    )


_JUDGED = {(loss, norm): _judged(loss, norm) for loss in _LOSSES for norm in _NORMS}
