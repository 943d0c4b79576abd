"""Places: modules whose forward may compute attention, and the row of the table each belongs to.

    places = find(models, table)             one Place for each module that may be running
    THREAD.here.place                        the innermost one whose forward runs now, or None

A call of F.scaled_dot_product_attention knows nothing of layers; hooks on the modules around it
do. The innermost module that is not one of torch's own leaves names the call. In compiled code the
hooks become two custom operators (capture.py) that do the same when the code runs, so that all
blocks share one graph.

An attention is told by its name or its class's. What lies in one counts as attention too (`Head` in
`MultiHeadAttention`), less norms, gates and the like, and where it belongs to one layer.

A place's row is the module itself if the table has it, else its query projection, else the first
layer in it, else the row of the module around it.

Threads: each has its own forward. An actor that asks the model, or evaluation beside the training,
         does not move the place of the thread that trains; which one that is need not be known.
         Replicas in threads and autograd's own, which recompute on CUDA, find their way like this
         too. A process-wide place would give one thread's attention to another's layer.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext

from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes import capping
from sentinel_hooks.seams.safe_point import INERT

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_BESIDE = re.compile(r"norm|drop|mask|bias|embed|rotary|output", re.IGNORECASE)
_NO_SCORES = re.compile(r"rout|gat(e|ing)|expert|moe|mlp|ffn|ffwd|feed", re.IGNORECASE)
_QUERY = re.compile(
    r"^(q|qkv|wq|wqkv|query|q_proj|q_a_proj|q_lin|q_linear|qkv_proj|in_proj|c_attn|attn_qkv|"
    r"query_key_value|to_q|to_qkv|w_q|in_proj_qkv)$",
    re.IGNORECASE,
)
FULL_AGAIN = 100  # steps after which a layer that needed all rows is tried with few again
REMEMBERED = 32  # steps that it is computed for, since it was not known whether it was above
WATCHED = 0.8  # of the threshold: from here on the maximum is computed, not bounded
FEW, SOME, ALL = 0, 1, 2  # what is done at a place: bounds only, 16 rows exact, all rows exact


class Place:
    """One module that may compute attention, and what was captured there since the last step."""

    __slots__ = (
        "attention",
        "cap",
        "counts",
        "entered",
        "floor",
        "heads",
        "high",
        "keys",
        "kind",
        "level",
        "low",
        "masked",
        "math",
        "measurements",
        "name",
        "named_cap",
        "passed",
        "patience",
        "raw",
        "row",
        "seen",
        "shifted",
        "since",
        "slot",
        "token",
        "top",
        "trouble",
        "unknown",
        "until",
    )

    def __init__(self, name: str, row: int, attention: bool, heads: int, slot: Tensor) -> None:
        self.name = name
        self.row = row
        self.attention = attention  # by its name
        self.counts = attention  # its softmax is attention: by its name, or that of one around it
        self.heads = heads
        self.slot = slot  # its address names the place in compiled code
        self.entered = False  # its forward has run
        self.measurements = 0
        self.level = SOME
        self.since = 0  # the step at which `level` became ALL
        self.floor = FEW  # at least that until the step `until`: it was not known whether above
        self.until = 0
        self.patience = REMEMBERED
        self.unknown = 0  # steps in which it was not known
        self.shifted = False  # the last scores had rows of which the maximum was subtracted
        self.named_cap = 0.0  # the soft cap of its scores, by its module's attributes
        self.cap: float | None = None  # by what it computed: 0.0 none, nan not known, None not yet
        self.passed = 0  # softmaxes that looked like attention, and were not taken for it
        self.math = False  # the last call took a path without a log-sum-exp
        self.seen = False  # captured in a forward since the last step: a recomputation adds nothing
        self.raw: list[Tensor] = []  # log-sum-exps [B, H, T], reduced at the gate
        self.top: list[Tensor] = []  # [H], their maxima where they are large
        self.low: list[Tensor] = []
        self.high: list[Tensor] = []
        self.keys = 1
        self.masked = False
        self.trouble = ""
        # The type of the last plain call's autograd node: the next one is told by it at once.
        self.kind: Any = None

    def clear(self) -> None:
        """Start a new step."""
        self.raw = []
        self.top = []
        self.low = []
        self.high = []
        self.keys = 1
        self.masked = False
        self.seen = False


class Here:
    """Where one thread's forward is."""

    __slots__ = ("outer", "place")

    def __init__(self) -> None:
        self.place: Place | None = None
        # By place, so that what exceptions leave behind is no more than there are places: a
        # checkpoint that stops early raises out of each forward that it recomputes.
        self.outer: dict[Place, Place | None] = {}

    def enter(self, place: Place) -> None:
        """The forward of `place` begins."""
        place.entered = True
        self.outer[place] = self.place
        self.place = place

    def leave(self, place: Place) -> None:
        """It ended; whatever was inside and raised is over too."""
        self.place = self.outer.pop(place, None)

    def forget(self) -> None:
        """No forward runs: an exception may have left one half way."""
        self.place = None
        self.outer.clear()


class _Thread(threading.local):
    def __init__(self) -> None:  # once in each thread
        self.here = Here()


class Where:
    """What concerns the forwards of all threads. Process-wide: so are the functions that ask."""

    __slots__ = ("by_address", "compiled", "lost")

    def __init__(self) -> None:
        self.by_address: dict[int, Place] = {}
        self.compiled = False  # a compiled module has told us where it is
        self.lost = 0  # calls outside of every place


THREAD = _Thread()
WHERE = Where()


is_compiling = torch.compiler.is_compiling
# torch.export: nothing of ours belongs into what is exported. Known since torch 2.7.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)


def is_traced_through() -> bool:
    """Somebody traces, and our code is run, not read: tensors are fake, and ours are real.

    Dynamo reads it, answers this with False and puts what it finds into its graph. Decompositions,
    functions that are allowed in a graph, AOTAutograd and torch.export run it.
    """
    return is_compiling() and not torch.compiler.is_dynamo_compiling()


def is_moded() -> bool:
    """A TorchFunctionMode is in force, other than torch's default device; dynamo can read this.

    It is the user's, and would be told of our operators.
    """
    for i in range(torch._C._len_torch_function_stack()):
        if type(torch._C._get_function_stack_at(i)) is not DeviceContext:
            return True
    return False


class _Hook:
    """A hook that does not travel: in a copy or a pickle of its module it is inert."""

    def __init__(self, place: Place, token: Tensor) -> None:
        self.place = place
        self.slot = place.slot
        self.token = token

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return INERT

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (INERT.func, *INERT.args)


def by_itself(hook: type) -> None:
    """Never compile `hook.__call__` as a function of its own, only inside of what is compiled.

    The hooks of a module that is compiled itself run outside of its code. torch.compile would make
    a graph of each, which costs more than they do.
    """
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction as Action,
        )
        from torch._C._dynamo.eval_frame import (
            _FrameExecStrategy as Strategy,
        )
        from torch._C._dynamo.eval_frame import (
            set_code_exec_strategy,
        )
    except ImportError:  # an older torch: one small graph more for each
        return
    code = hook.__call__.__code__
    set_code_exec_strategy(code, Strategy(Action.SKIP, Action.SKIP))


class Enter(_Hook):
    """Forward pre-hook."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if is_compiling():
            if not (is_exporting() or is_traced_through() or is_moded()):
                torch.ops.torch_sentinel.enter(self.token, self.slot)
        else:
            THREAD.here.enter(self.place)


class Leave(_Hook):
    """Forward hook."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_compiling():
            if not (is_exporting() or is_traced_through() or is_moded()):
                torch.ops.torch_sentinel.leave(self.token, self.slot)
        else:
            THREAD.here.leave(self.place)


by_itself(Enter)
by_itself(Leave)


def find(
    models: Sequence[nn.Module], table: LayerTable, slots: Callable[[int], list[Tensor]]
) -> list[tuple[nn.Module, Place]]:
    """Modules that may compute attention, outermost first, each with its place.

    Args:
        slots: makes so many one-element tensors, whose addresses name the places.
    """
    found: list[tuple[nn.Module, str, int, bool, bool, int]] = []
    seen: set[int] = set()
    for model in models:
        rows: dict[str, int] = {}
        inside: dict[str, bool] = {}  # it is, or lies in, an attention of one layer
        for name, module in model.named_modules():
            if id(module) in seen or not _may_attend(module):
                continue
            seen.add(id(module))
            around = name
            row = _anchor(module, table)
            while row < 0 and around:
                around = around.rpartition(".")[0]
                row = rows.get(around, -1)
            rows[name] = row
            heads = getattr(module, "num_heads", 0)
            words = (name.rpartition(".")[2], type(module).__name__)
            # A projection in layers of its own (LoRA on c_attn) is none, whatever it is called.
            attention = not _QUERY.match(words[0]) and any(
                _ATTENTION.search(w) and not _BESIDE.search(w) for w in words
            )
            around = name
            while around and around not in inside:
                around = around.rpartition(".")[0]
            counts = attention or (
                inside.get(around, False)
                and not any(_BESIDE.search(w) or _NO_SCORES.search(w) for w in words)
            )
            inside[name] = counts and row >= 0
            if not isinstance(heads, int):
                heads = 0
            found.append((module, name, row, attention, counts, heads))
    places = []
    for (module, name, row, attention, counts, heads), slot in zip(
        found, slots(len(found)), strict=True
    ):
        place = Place(name or type(module).__name__, row, attention, heads, slot)
        place.counts = counts
        place.named_cap = capping.by_name(module)
        places.append((module, place))
    return places


def _may_attend(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    return not type(module).__module__.startswith(("torch.nn.modules.", "torch.ao.nn."))


def _anchor(module: nn.Module, table: LayerTable) -> int:
    rows, layers = table.rows_under(module), table.layers
    if not rows or len({layers[row].block for row in rows} - {None}) > 1:
        return -1  # nothing, or a whole stack of blocks: no one row stands for it
    for row in rows:
        if _QUERY.match(layers[row].name.rpartition(".")[2]):
            return row
    for row in rows:
        if "norm" not in layers[row].kind.lower() and "norm" not in layers[row].name.lower():
            return row
    return rows[0]
