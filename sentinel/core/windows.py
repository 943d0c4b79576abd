"""Order statistics of short sorted windows, and the scale losses are compared on.

    ordered = sorted(window)
    m = median(ordered)
    s = mad(ordered, m)
    y = to_log(loss, floor)

At 64 values numpy's call overhead costs more than the work, so the scalar detectors sort lists.
Every function takes values that are sorted already: one sort serves median, spread and quantile.
The results equal numpy's median and linear quantile to the last bit.

Purity:  no clock, no I/O, no randomness.
Errors:  none; the windows are never empty.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

LARGEST = sys.float_info.max

MAD_TO_STD = 1.4826  # for a normal distribution, std = 1.4826 * MAD
Q90_TO_STD = 1.2816  # for a normal distribution, 90 % quantile = median + 1.2816 std


def median(ordered: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    n = len(ordered)
    h = n >> 1
    if n & 1:
        return ordered[h]
    return (ordered[h - 1] + ordered[h]) / 2


def mad(ordered: Sequence[float], centre: float) -> float:
    """Median absolute deviation from `centre`.

    The half of the values nearest to `centre` is one stretch of a sorted window: bisection finds
    it in six comparisons, where sorting 64 distances takes three times as long.
    """
    n = len(ordered)
    k = (n + 1) >> 1
    low, high = 0, n - k
    while low < high:
        i = (low + high) >> 1
        if centre - ordered[i] > ordered[i + k] - centre:
            low = i + 1
        else:
            high = i
    kth = max(centre - ordered[low], ordered[low + k - 1] - centre)
    if n & 1:
        return kth
    right = ordered[low + k] - centre if low + k < n else math.inf
    left = centre - ordered[low - 1] if low else math.inf
    return (kth + min(left, right)) / 2


def quantile(ordered: Sequence[float], q: float, centre: float = 0.0) -> float:
    """The q-quantile of the distances above `centre`, interpolated linearly."""
    at = q * (len(ordered) - 1)
    i = int(at)
    low = ordered[i] - centre
    t = at - i
    if t == 0.0:
        return low
    high = ordered[i + 1] - centre
    # From the nearer neighbour, as numpy does.
    return low + (high - low) * t if t < 0.5 else high - (high - low) * (1 - t)


def to_log(loss: float, floor: float) -> float:
    """y = ln(loss); below `floor` [nats], where relative moves are noise, linear in the loss."""
    return math.log(loss) if loss >= floor else math.log(floor) - (floor - loss)


def to_loss(y: float, floor: float) -> float:
    """The loss of which `to_log` makes y."""
    low = math.log(floor)
    return math.exp(min(y, 709.0)) if y >= low else floor - (low - y)


def to_plain(loss: float, floor: float) -> float:
    """`to_log` without the logarithm: linear everywhere, and the same below `floor`."""
    return math.log(floor) - (floor - loss)


def from_plain(y: float, floor: float) -> float:
    """The loss of which `to_plain` makes y."""
    return floor - (math.log(floor) - y)


def last_below(beyond: Callable[[float], bool], guess: float) -> float:
    """The largest float that is not `beyond`, of which all larger ones are; LARGEST if none is.

    `guess` is where it lies, up to rounding: the search begins there and widens.
    """
    width = 1e-13 * max(abs(guess), 1e-3)
    low = high = guess
    while beyond(low):
        low, width = low - width, width * 8.0
        if not low > -LARGEST:
            return -LARGEST
    while not beyond(high):
        high, width = high + width, width * 8.0
        if not high < LARGEST:
            return LARGEST
    while low < (middle := low + (high - low) / 2) < high:
        if beyond(middle):
            high = middle
        else:
            low = middle
    return low
