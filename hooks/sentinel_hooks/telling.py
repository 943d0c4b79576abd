"""Telling: the state of a session in words, for status(), the log and the sidecar."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.core.incidents import INSTABILITY
from sentinel.core.policy import Policy
from sentinel.core.state import Incident, Ledger
from sentinel.core.types import Decision, IncidentState, Mode, Protection
from sentinel_hooks.canary import Canary
from sentinel_hooks.layers import Layer, LayerTable
from sentinel_hooks.ledger_file import Keeper
from sentinel_hooks.probes.together import Probes
from sentinel_hooks.saving import Saving
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.status import NAMED, BlindSpot, named

RESOLVED = 3  # incidents that status() still shows when they are over
FLAGS = 3  # lines of one step
# What the runbook says first, of flags whose finding is a number alone.
_ADVICE = {
    "norm_band": (
        "above 50 look at initialisation, residual scale and a loss that is a sum; 10 to 50 is "
        "usual in the first hundred steps"
    ),
    "level_shift": "see whether the data, the batch size or the rate changed at that step",
}
GAIN_LEAST = 2  # blocks of which one can amplify the other's output


def protection(
    *, off: str, mode: Mode, ledger: Ledger, last: Decision | None, forsaken: bool
) -> tuple[Protection, str]:
    """Whether the run is guarded, and one sentence to it."""
    if off:
        return Protection.OFF, off
    if mode is Mode.OBSERVE:
        return Protection.OFF, "observing: decisions are made and recorded, nothing is done"
    if not ledger.automation:
        return Protection.OFF, "a person paused automation"
    if ledger.stopped:
        return Protection.OFF, "the rollback budget is spent; a person is needed"
    if last is None:
        return Protection.WARMING, "no step seen yet"
    if forsaken:
        return Protection.BLIND, "training goes on, but no watched optimizer steps any more"
    found = last.readings.protection
    if found is Protection.OFF:  # resumed since: the ledger says so already
        return Protection.WARMING, "automation was off at the last step, and is on from the next"
    if found is Protection.BLIND:
        return found, "neither loss nor gradient norm was measured at the last step"
    if found is Protection.WARMING:
        return found, (
            "baselines are warming up; non-finite gradients and losses are already acted on"
        )
    return found, "every rule has its baseline"


def incidents(ledger: Ledger) -> tuple[Incident, ...]:
    """For status(): all that are open, firing ones first, then the newest that are over."""
    states = IncidentState.FIRING, IncidentState.PENDING, IncidentState.RESOLVED
    firing, pending, over = ([i for i in ledger.incidents if i.state is s] for s in states)
    over.sort(key=lambda i: -1 if i.resolved is None else i.resolved)
    return (*firing, *pending, *over[-RESOLVED:])


def flags(before: Ledger, after: Ledger, layers: Sequence[Layer]) -> list[str]:
    """What the log says of flags that fire now and did not before; at most FLAGS + 1 lines.

    What was done about instability has log lines of its own.
    """
    if after.incidents is before.incidents:
        return []
    fired = {i.number for i in before.incidents if i.fired is not None}
    new = [
        i
        for i in after.incidents
        if i.fired is not None and i.number not in fired and i.key != INSTABILITY
    ]
    lines = []
    for i in new[:FLAGS]:
        where = f" layers={named(i.layers, layer_names((i,), layers))}" if i.layers else ""
        also = f": {_ADVICE[i.key]}" if i.key in _ADVICE else ""
        lines.append(f"flag={i.key}{where} advice={i.summary}{also}")
    if len(new) > FLAGS:
        more = ", ".join(i.key for i in new[FLAGS:])
        lines.append(f"flags={more} advice=session.status() has them")
    return lines


def layer_names(incidents: Sequence[Incident], layers: Sequence[Layer]) -> dict[int, str]:
    """Of the layers that `incidents` name, by index."""
    rows = {row for incident in incidents for row in incident.layers}
    return {row: layers[row].name for row in sorted(rows) if 0 <= row < len(layers)}


def canary(canary: Canary | None, step: int, *, off: bool) -> str:
    """Whether it can be asked, or why not."""
    if canary is None:
        return "off by policy"
    return "not asked: nothing is watched any more" if off else canary.availability(step)


def of_the_loop(
    *, forsaken: int, loss_unseen: bool, forward_unseen: bool, unlisted: int
) -> list[BlindSpot]:
    """What the loop hides.

    Args:
        forsaken: training forwards since a watched optimizer stepped, when they are too many.
        unlisted: parameters of no listed layer.
    """
    spots: list[BlindSpot] = []
    if forsaken:
        spots.append(
            BlindSpot(
                f"{forsaken} training forwards since a watched optimizer stepped",
                "was the optimizer made anew? detach(), and attach() the one that is stepped",
            )
        )
    if loss_unseen:
        spots.append(
            BlindSpot(
                "the loss of the last step was not seen",
                "it must come from a scalar's backward(); torch.autograd.grad loops hide it",
            )
        )
    if forward_unseen:
        spots.append(
            BlindSpot(
                "no training forward of the watched model is seen (compiled inside, in eval "
                "mode, or called past __call__): snapshots are taken right after the step, and "
                "there are no tokens a second and no canary",
                "attach the object that the loop calls, for example the compiled wrapper",
            )
        )
    if unlisted:
        spots.append(
            BlindSpot(
                f"{unlisted} parameters belong to no listed layer: they count in the global norm "
                "only",
                "attach when the model is complete",
            )
        )
    return spots


def of_strangers(strangers: Sequence[str]) -> list[BlindSpot]:
    """Optimizers that step in this process and are nobody's.

    Args:
        strangers: each kind in words, newest last.
    """
    if not strangers:
        return []
    shown = "; ".join(strangers[-NAMED:])
    more = f"; and {len(strangers) - NAMED} more" if len(strangers) > NAMED else ""
    what = (
        "an optimizer that is not watched steps"
        if len(strangers) == 1
        else ("optimizers that are not watched step")
    )
    return [
        BlindSpot(
            f"{what}: {shown}{more}",
            "give it to attach(optimizer=[...]) with the others, and its model to model=[...]; an "
            "inner loop or an evaluation that steps one of its own is none of the run, and may",
        )
    ]


def of_the_depth(table: LayerTable, policy: Policy) -> list[BlindSpot]:
    """Flags about depth, where nothing is known of the blocks (see blocks.py).

    Of a model that has two blocks nothing is missed.
    """
    if len(table) < policy.depth.least or any(x.block is not None for x in table.layers):
        return []
    least = {"depth": policy.depth.least, "residual_gain": GAIN_LEAST}
    blind = [name for name in least if getattr(policy.rules, name).mode is not Mode.OFF]
    if not blind:
        return []
    return [
        BlindSpot(
            f"{' and '.join(blind)} {'are' if len(blind) > 1 else 'is'} not judged: of the names "
            f"of {len(table)} layers none says in which block it lies, and "
            f"{' and '.join(str(least[name]) for name in blind)} blocks are needed",
            "hold the blocks in an nn.ModuleList or nn.Sequential, or name them by one word and a "
            "number (block_0, block_1); of a model with fewer there is nothing to judge",
        )
    ]


def of_the_probes(probes: Probes) -> list[BlindSpot]:
    """Signals that are not seen."""
    return [BlindSpot(spot.what, spot.way_out) for spot in probes.blind_spots()]


def notes(saving: Saving, probes: Probes) -> tuple[str, ...]:
    """What was settled without asking, and costs no protection."""
    left_out = saving.ram.left_out
    if not left_out:
        return tuple(probes.notes())
    few = ", ".join(left_out[:NAMED])
    more = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
    said = (
        f"snapshots leave out what holds no data (meta device, as offloaded weights do): {few}"
        f"{more}; no optimizer trains them, so they cannot change"
    )
    return (said, *probes.notes())


def of_saving(saving: Saving, config: Snapshots, keeper: Keeper) -> list[BlindSpot]:
    """What could not be copied or written down."""
    spots: list[BlindSpot] = []
    if not config.ram and not saving.disk.enabled:
        spots.append(BlindSpot("no snapshots: nothing to roll back to", "use Snapshots(ram=True)"))
    elif saving.trouble:
        spots.append(BlindSpot(f"snapshots fail: {saving.trouble}", ""))
    if keeper.trouble:
        spots.append(
            BlindSpot(
                f"the ledger cannot be written: {keeper.trouble}",
                "a restarted process will not know what was done",
            )
        )
    if keeper.strange:
        spots.append(BlindSpot(f"after the restart {keeper.told}; statistics started cold", ""))
    if saving.disk.trouble:
        spots.append(BlindSpot(f"no snapshot reaches the disk: {saving.disk.trouble}", ""))
    return spots


def of_the_trace(trouble: str, lost: int) -> list[BlindSpot]:
    """Holes in the record."""
    if trouble:
        what = f"the trace has holes: {trouble}"
        return [BlindSpot(what, f"{lost} records are missing so far; it is tried every step")]
    if lost:
        what = f"the trace has holes: {lost} records are missing"
        return [BlindSpot(what, "the disk had failed; it is written again")]
    return []
