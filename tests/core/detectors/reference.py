"""The loss-spike rule, written down plainly in numpy: the oracle of the tests.

    readings = spike(losses, norms, **settings)
    drifts = level_shift(losses, sigmas, **settings)

Nothing here is incremental or fast, and nothing of ours is imported. The numbered comments are
the items of the rule; where the rule is silent the choice is said in words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class Row:
    """What the rule says of one step; z, r, sigma, gz are None where they are not defined."""

    level: int = 0
    hot: bool = False
    judged: bool = False
    z: float | None = None
    r: float | None = None
    predicted: float | None = None
    sigma: float | None = None
    gz: float | None = None
    outlier: bool = False
    accepted: bool = False
    recurrent: bool = False


def transform(loss: float, floor: float = 0.05) -> float:
    """Item 2: y = ln(loss), linear below the floor."""
    return math.log(loss) if loss >= floor else math.log(floor) - (floor - loss)


def plain(y: float, floor: float) -> float:
    """The same value with y linear above the floor too."""
    return y if y < math.log(floor) else math.log(floor) - (floor - math.exp(min(y, 709.0)))


def line(values: list[float], sigma_floor: float = 0.004) -> tuple[float, float]:
    """Items 3 and 4: prediction and sigma of a buffer; nothing is expected below its lowest."""
    x = np.array(values)
    n = len(x)
    h = n // 2
    m1, m2 = np.median(x[:h]), np.median(x[h:])
    slope = min(0.0, (m2 - m1) / (n - h))
    predicted = max(m2 + slope * (n - h) / 2, min(values))
    middle_of_newer = h + (n - h) / 2
    residuals = x - (m2 + slope * (np.arange(n) - middle_of_newer))
    centred = residuals - np.median(residuals)
    mad = 1.4826 * np.median(np.abs(centred))
    q90 = np.quantile(centred, 0.9) / 1.2816
    return float(predicted), float(max(mad, q90, sigma_floor))


def spike(
    losses: list[float | None],
    norms: list[float | None],
    *,
    window: int = 64,
    warmup: int = 48,
    z_hot: float = 8.0,
    r_hot: float = 0.08,
    z_stay: float = 3.0,
    r_stay: float = 0.04,
    z_grad: float = 6.0,
    grad_factor: float = 4.0,
    z_with_grad: float = 4.0,
    r_with_grad: float = 0.02,
    rearm: int = 5,
    sigma_floor: float = 0.004,
    grad_sigma_floor: float = 0.10,
    accept_after: int = 128,
    loss_floor: float = 0.05,
    persist_hot: int = 3,
    persist_window: int = 6,
    persist_run: int = 2,
    persist_excess: float = 0.5,
    recur_count: int = 6,
    recur_window: int = 512,
    recur_margin: float = 1.5,
) -> list[Row]:
    """The whole rule over a series; None is a signal that was not measured."""
    buffer: list[float] = []  # accepted y
    grads: list[float] = []  # accepted ln g
    history: list[bool] = []  # of every step with a loss since the baseline began
    excesses: list[float] = []  # r of the hot steps in a row
    staying = False  # the lower thresholds are in force
    clean = 0
    age = 0
    judged = 0
    lone: list[tuple[int, float]] = []  # (judged, r) of outliers that came back by themselves
    trail: list[tuple[str, float]] = []  # what each step since the baseline began was, and its r
    rows: list[Row] = []
    for loss, norm in zip(losses, norms, strict=True):
        row = Row()
        rows.append(row)
        if loss is None:
            continue
        if not math.isfinite(loss):  # 1: hot, counts for persistence but not towards accepting
            row.level, row.hot = 3, True
            if not staying:
                age = 0
            staying, clean = True, 0
            history.append(True)
            excesses.append(0.0)
            trail.append(("hot", 0.0))
            continue
        y = transform(loss, loss_floor)
        bad_norm = norm is not None and not math.isfinite(norm)
        usable = norm is not None and not bad_norm and norm > 0  # ln of a norm of 0 says nothing
        ln_g = math.log(norm) if usable and norm is not None else None

        if len(buffer) < warmup:
            row.level = 3 if bad_norm else 0
            clean += 1
            staying = staying and clean < rearm
            history.append(False)
            excesses = []
            trail.append(("warming", 0.0))
            buffer.append(y)
            if ln_g is not None:
                grads.append(ln_g)
            buffer, grads = buffer[-window:], grads[-window:]
            continue

        row.judged = True
        if min(buffer) < transform(0.0, loss_floor):  # a loss below zero: no logarithms
            row.predicted, row.sigma = line([plain(v, loss_floor) for v in buffer], sigma_floor)
            row.r = math.log(loss_floor) - (loss_floor - loss) - row.predicted
        else:
            row.predicted, row.sigma = line(buffer, sigma_floor)
            row.r = y - row.predicted
        row.z = row.r / row.sigma
        gbad = False
        if ln_g is not None and norm is not None and len(grads) >= warmup:  # 5
            g = np.array(grads)
            middle = float(np.median(g))
            g_sigma = max(1.4826 * float(np.median(np.abs(g - middle))), grad_sigma_floor)
            row.gz = (ln_g - middle) / g_sigma
            gbad = row.gz > z_grad and norm > grad_factor * math.exp(middle)
            row.outlier = gbad
            if gbad:
                ln_g = middle + z_grad * g_sigma
        spiking = (row.z > z_hot and row.r > r_hot) or (  # 6
            gbad and row.z > z_with_grad and row.r > r_with_grad
        )
        with_norm = gbad and row.z > z_with_grad and row.r > r_with_grad
        row.hot = spiking or (staying and row.z > z_stay and row.r > r_stay)
        # Lone outliers of the usual size are the data's own, unless they follow on another.
        usual = [r for at, r in lone[-16:] if judged - at < recur_window]
        row.recurrent = (
            row.hot
            and not with_norm
            and trail[-1][0] not in ("hot", "recurrent")
            and len(usual) >= recur_count > 0
            and row.r <= recur_margin * float(np.median(usual))
        )
        row.hot = row.hot and not row.recurrent
        history.append(row.hot)
        trail.append(("hot" if row.hot else "recurrent" if row.recurrent else "clean", row.r))
        # A run of one or two hot steps followed by two clean ones was a lone outlier.
        kinds = [kind for kind, _ in trail]
        if row.recurrent:
            lone.append((judged, row.r))
        elif kinds[-2:] == ["clean", "clean"] and kinds[-3:-2] == ["hot"]:
            hot_run = []
            for kind, r in reversed(trail[:-2]):
                if kind != "hot":
                    break
                hot_run.append(r)
            mean = _sum(hot_run[::-1]) / len(hot_run)
            if len(hot_run) <= 2 and mean > 0:
                lone.append((judged, mean))
        judged += 1
        if row.hot:
            if not staying:
                age = 0
            staying, clean = True, 0
            age += 1
            excesses.append(row.r)
            row.level = 1
            in_a_row = len(excesses) >= persist_run and _sum(excesses) >= persist_excess
            if sum(history[-persist_window:]) >= persist_hot or in_a_row:  # 7
                row.level = 2
            if age == accept_after:  # 9: everything begins anew
                row.accepted = True
                buffer, grads, history, excesses = [], [], [], []
                staying, clean, age = False, 0, 0
                judged, lone, trail = 0, [], []
        else:
            clean += 1
            staying = staying and clean < rearm
            age = age if staying else 0
            excesses = []
            if not row.recurrent:
                buffer.append(y)
                if ln_g is not None:
                    grads.append(ln_g)
            buffer, grads = buffer[-window:], grads[-window:]
        if bad_norm:
            row.level = 3
    return rows


def _sum(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def level_shift(
    losses: list[float | None],
    sigmas: list[float],
    *,
    width: int = 32,
    every: int = 4,
    look: int = 1024,
    rise: float = 0.10,
    z: float = 3.0,
    decay: float = 0.98,
    needed: int = 4,
    loss_floor: float = 0.05,
    away_rise: float = 0.3,
    accept_after: int = 128,
) -> list[tuple[float, bool, float | None]]:
    """Item 8: (drift, shifted, excess when away) after every step.

    Drift and shifted stand until the next median.
    """

    def above(low: float, y: float) -> float:
        negative = low < transform(0.0, loss_floor)
        return (plain(y, loss_floor) if negative else y) - low

    def both_sides(low: float) -> float:  # twice the depth below zero
        return -2.0 * (loss_floor - (math.log(loss_floor) - low))

    ys: list[float] = []
    medians: list[tuple[int, float, float]] = []  # with the spread at that time
    ema: float | None = None
    drift, shifted, low, low_spread, away = 0.0, False, 0.0, 0.0, 0
    answers: list[tuple[float, bool, float | None]] = []
    for loss, sigma in zip(losses, sigmas, strict=True):
        excess = None
        forget = False
        if loss is not None and math.isfinite(loss):
            ys.append(transform(loss, loss_floor))
            if not math.isnan(sigma):
                ema = sigma if ema is None else decay * ema + (1 - decay) * sigma
            n = len(ys)
            if ema is not None and n >= width and n % every == 0:
                now = float(np.median(ys[-width:]))
                within = [(m, -at, spread) for at, m, spread in medians if n - at <= look]
                if within and len(medians) >= needed:
                    low, _, low_spread = min(within)  # the latest of equal ones
                    drift = above(low, now)
                    shifted = drift > max(rise, z * ema, both_sides(low))
                medians.append((n, now, ema))
            # Far away: steps as far above the lowest level as the drift itself must be.
            least = max(away_rise, z * low_spread, both_sides(low))
            if not (away_rise > 0 and drift > least):
                away = 0
            elif above(low, ys[-1]) > least:
                excess = above(low, ys[-1])
                away += 1
                forget = away == accept_after
        answers.append((drift, shifted, excess))
        if forget:
            ys, medians, away = [], [], 0
            drift, shifted, low, low_spread = 0.0, False, 0.0, 0.0
    return answers
