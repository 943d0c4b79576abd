"""Activation probe: RMS, largest magnitude and spread of what every block puts out.

    probe = ActivationProbe(models, table)
    probe.attach(); ...; probe.before_step(step); values = read(probe.pending(), [])[0]
    columns = resolve(probe, values)

Two reductions a block and micro-batch, written into buffers that are there from the start: all of
them when the forward of the whole model ends, as each line of code that runs between two kernels is
fetched anew. Until then an output is held weakly. One that autograd does not keep, or that somebody
writes into, is told by the first forward and reduced at once; if that changes later, it is left out
once. Outputs of up to SMALL elements are reduced together at the gate instead, where Python costs
more than the numbers.

nan and inf pass through: a row that is not finite says that the block's output is not (an RMS may
be inf for finite outputs beyond 1e19: then the largest magnitude is finite).

The spread says whether a block still tells its tokens apart: of up to 32 tokens, the norm of what
differs from their mean over the norm of all. Near 0 all are alike: the representation has
collapsed. Taken every `every` steps, of the first micro-batch, of outputs [B, T, D]: rows of a 2-d
output are samples, which a regressor's head tells apart by little beside its bias.

A block is a child of a ModuleList or Sequential that has a number for a name, outermost first, or
what blocks.py makes out; without any, the root's own children. Of more than MOST blocks an even
selection is watched.

Shapes:  columns float32 [L]. A block's numbers stand in the row of its last layer.
Memory:  the small outputs, at most 1 MB, stay until the gate; one that somebody writes into after
         the block is told by its version, is left out once, and is reduced at once from then on.
Purity:  does not wait for the device. Under no_grad (evaluation), and when a forward is recomputed
         in a backward pass, nothing is measured; nor inside of torch.jit.trace and torch.func.
Threads: forwards in several threads at once are all measured, each like a micro-batch; replicas on
         several devices (DataParallel) on the device whose output came first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sentinel.core.types import (
    LAYER_ACTIVATION_ABSMAX,
    LAYER_ACTIVATION_RMS,
    LAYER_ACTIVATION_SPREAD,
    NOT_MEASURED,
    Column,
)
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.probes import capture, outputs
from sentinel_hooks.probes.apart import apart, is_watched
from sentinel_hooks.probes.places import (
    by_itself,
    is_compiling,
    is_exporting,
    is_moded,
    is_traced_through,
)
from sentinel_hooks.probes.probe import (
    EARLIER,
    NEVER,
    UNSEEN_AFTER,
    Combine,
    Float64,
    Parts,
    Quiet,
    Unseen,
    column,
)
from sentinel_hooks.seams.safe_point import INERT, Hook, is_tracing, is_transforming

SQUARES, COUNT, LARGEST, SPREAD = (
    "activation_squares",
    "activation_count",
    "activation_absmax",
    "activation_spread",
)
MOST = 128  # blocks
SLOTS = 4  # micro-batches that are kept apart until the gate; more are folded into one
TOKENS = 32  # of which the spread is taken
SMALL = 2048  # elements; 128 blocks of them are 1 MB
_NORM, _LOW, _HIGH, _SPREAD, _FIELDS = range(5)


class Block:
    """One watched module, and where its numbers go."""

    __slots__ = (
        "at",
        "count",
        "device",
        "index",
        "kept",
        "kept_version",
        "lone",
        "name",
        "numel",
        "odd",
        "path",
        "picked",
        "row",
        "seen",
        "slot",
        "small",
        "spread",
        "trouble",
        "version",
        "views",
        "waits",
        "wanted",
    )

    def __init__(self, name: str, row: int, index: int, slot: Tensor) -> None:
        self.name = name
        self.row = row
        self.slot = slot  # its address names the block in compiled code
        self.device: torch.device | None = None
        self.index = index  # in every buffer
        self.views: list[list[Tensor]] = []  # [slot][field], 0-d views of the buffer
        self.count = 0  # slots in use
        self.numel = 0
        self.spread = False  # was taken since the last step
        self.wanted = True  # shall be taken
        self.seen = False  # in a forward since the last step
        self.trouble = ""
        self.odd = ""  # what it put out, where that is nothing to measure
        self.path: outputs.Path | None = None  # where in its output the measured tensor stands
        self.at = -1  # the same, if it is an item of a tuple
        self.picked = ""  # the same in words, of several that it might have been
        # Its outputs are there when the forward ends, as they were put out; None: not known yet.
        self.waits: bool | None = None
        self.version = 0  # how often they had been written into by then
        self.small = True  # nobody was seen to write into its outputs
        self.lone = False  # the first output since the last step, if small, may wait for the gate
        self.kept: Tensor | None = None  # ... and does
        self.kept_version = 0


# Weak: what is process-wide must not keep a run alive.
_BY_ADDRESS: dict[int, tuple[weakref.ref[ActivationProbe], Block]] = {}


class _Out:
    """A forward hook that does not travel: in a copy or a pickle of its module it is inert."""

    def __init__(self, probe: ActivationProbe, block: Block, token: Tensor) -> None:
        self.probe = probe
        self.block = block
        self.slot = block.slot
        self.token = token

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling():
            self._trace(args, kwargs, output)
            return
        block, x = self.block, output
        if not isinstance(x, Tensor):
            at = block.at  # most blocks put out a tuple, and it is always the same item
            x = output[at] if type(output) is tuple and -1 < at < len(output) else None
        if block.waits and type(x) is Tensor:
            # As little Python as can be: after a kernel the caches are cold, and a line is dear.
            here = self.probe.thread.here
            if here.open:
                here.waiting.append((block, weakref.ref(x)))
                return
        if not torch.is_grad_enabled():
            return
        if not isinstance(x, Tensor):
            with apart(None):
                x = self._chosen(args, kwargs, output)
        if x is None or is_transforming() or is_tracing() or type(x) is FakeTensor:
            return
        self.probe.take(block, x)

    def _trace(self, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or is_exporting() or is_traced_through() or is_moded():
            return
        x = output if isinstance(output, Tensor) else outputs.traced(output, args, kwargs)
        if x is not None:
            torch.ops.torch_sentinel.activated(self.token, self.slot, x.detach())

    def _chosen(self, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        block = self.block
        x = None if block.path is None else outputs.at(output, block.path)
        if x is not None:
            return x
        try:
            choice = outputs.choose(output, args, kwargs)
            if choice is None:
                block.odd = block.odd or outputs.kind(output)
                return None
        except Exception as error:  # noqa: BLE001  nothing of ours may end the user's forward
            block.trouble = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return None
        block.path = choice.path
        block.at = -1
        if isinstance(output, tuple) and len(choice.path) == 1:
            block.at = int(choice.path[0])
        block.picked = str(choice) if choice.among > 1 else ""
        return choice.tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return INERT

    def __reduce__(self) -> tuple[Any, ...]:
        return INERT.__reduce__()  # type: ignore[return-value]


class Edge(Hook):
    """Where the forward of a root model begins, or ends."""


class Forward:
    """What one thread's forward has put out so far, held weakly: nothing lives longer for us."""

    __slots__ = ("learning", "open", "waiting")

    def __init__(self) -> None:
        self.open = False  # it is under way, with gradients
        self.waiting: list[tuple[Block, weakref.ref[Tensor]]] = []
        self.learning: list[tuple[Block, weakref.ref[Tensor], int]] = []


class _Thread(threading.local):
    def __init__(self) -> None:  # once in each thread
        self.here = Forward()


by_itself(_Out)


def _run_activated(token: Tensor, slot: Tensor, x: Tensor) -> None:
    found = _BY_ADDRESS.get(slot.data_ptr())
    probe = found[0]() if found is not None else None
    if found is not None and probe is not None:
        probe.take(found[1], x, compiled=True)


capture.operator("activated", "Tensor slot, Tensor x", _run_activated)


class ActivationProbe(Quiet):
    """Watches the blocks of `models`."""

    combine: Mapping[str, Combine] = {
        SQUARES: Combine.SUM,
        COUNT: Combine.SUM,
        LARGEST: Combine.MAX,
        SPREAD: Combine.MAX,
    }

    def __init__(self, models: Sequence[nn.Module], table: LayerTable, every: int = 10) -> None:
        self._table = table
        self._every = every
        self._modules, self._blocks = _blocks(models, table)
        self._buffers: dict[torch.device, Tensor] = {}
        self._handles: list[Any] = []
        self._models = tuple(models)
        self.thread = _Thread()
        self._lock = threading.RLock()  # forwards in threads write into the same slots
        self._taken: list[tuple[int, npt.NDArray[np.intp]]] = []  # slots used, state by block
        self._small: list[tuple[list[int], int]] = []  # rows, elements of each
        self._vectors: list[Tensor] = []
        self._gates = 0
        self._steps = 0  # with a measurement

    @property
    def watched(self) -> list[Block]:
        """The blocks."""
        return self._blocks

    def attach(self) -> None:
        """One forward hook for each block."""
        if self._handles:
            return
        for module, block in zip(self._modules, self._blocks, strict=True):
            _BY_ADDRESS[block.slot.data_ptr()] = (weakref.ref(self), block)
            token = capture.token(block.slot.device)
            self._handles.append(
                module.register_forward_hook(_Out(self, block, token), with_kwargs=True)
            )
        for model in self._models:
            self._handles += [
                model.register_forward_pre_hook(Edge(self._begin)),
                model.register_forward_hook(Edge(self._end)),
            ]

    def detach(self) -> None:
        """Everything out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.thread = _Thread()
        for block in self._blocks:
            _BY_ADDRESS.pop(block.slot.data_ptr(), None)
            block.kept = None

    # -- in the forward ------------------------------------------------------------------------

    def take(self, block: Block, x: Tensor, *, compiled: bool = False) -> None:
        """Measure one output; called in the user's forward, so nothing may come out of it."""
        first = torch._C._current_graph_task_id() == -1
        if (block.seen and not first) or block.trouble:
            return
        block.seen = block.seen or first
        learn = block.waits is None and not compiled and type(x) is Tensor
        if is_watched(x):
            with apart(x):
                self._keep(block, x, learn)
        else:
            self._keep(block, x, learn)

    def _keep(self, block: Block, x: Tensor, learn: bool = False) -> None:
        """A small one for the gate, any other measured at once; called where nobody sees it."""
        try:
            with self._lock:
                versioned = (learn or block.lone) and not x.is_inference()
                if learn and versioned and self.thread.here.open:
                    self.thread.here.learning.append((block, weakref.ref(x), x._version))
                small = block.lone and versioned and x.numel() <= SMALL
                block.lone = False
                if small:
                    block.kept = x.detach()  # shares memory and version
                    block.kept_version = x._version
                else:
                    self._take(block, x.detach())
        except Exception as error:  # noqa: BLE001  nothing of ours may end the user's forward
            block.trouble = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _begin(self, *_: Any) -> None:
        """A forward begins: what is put out in it may be measured when it ends."""
        here = self.thread.here
        here.waiting, here.learning = [], []  # of one that raised
        here.open = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def _end(self, *_: Any) -> None:
        """It ended, and what autograd has kept for its backward pass is still there."""
        here = self.thread.here
        here.open = False
        waiting, here.waiting = here.waiting, []
        learning, here.learning = here.learning, []
        if not (waiting or learning):
            return
        with apart(None):  # all of them are plain tensors: seen by modes, if by anybody
            for block, output in waiting:
                x = output()
                if not _as_it_was(x, block.version):
                    block.waits = False
                elif not block.trouble:
                    block.seen = True
                    self._keep(block, x)
            for block, output, version in learning:
                known = block.waits is None or (block.waits and block.version == version)
                block.waits = known and _as_it_was(output(), version)
                block.version = version

    def _take(self, block: Block, x: Tensor) -> None:
        if not x.is_floating_point():
            block.odd = str(x.dtype)
            return
        if not x.numel():
            return
        if block.device != x.device or not block.views:
            if block.count:  # a replica on a device of its own: those of one device count
                return
            self._settle_in(block, x.device)
        self._write(block, x)
        block.numel += x.numel()
        if block.wanted and not block.spread and x.dim() == 3:
            rows = x.reshape(-1, x.size(-1))
            rows = rows[:: max(1, rows.size(0) // TOKENS)][:TOKENS].float()
            if rows.size(0) > 1:
                apart = torch.linalg.vector_norm(rows - rows.mean(0))
                block.views[0][_SPREAD].copy_(apart / torch.linalg.vector_norm(rows))
                block.spread = True

    def _write(self, block: Block, x: Tensor) -> None:
        """Into the next slot."""
        if block.count == SLOTS:
            _fold(block)
        view = block.views[block.count]
        if x.dtype == torch.float32:
            torch.linalg.vector_norm(x, out=view[_NORM])
            torch.aminmax(x, out=(view[_LOW], view[_HIGH]))
        else:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            view[_NORM].copy_(torch.linalg.vector_norm(x, dtype=wide))
            low, high = torch.aminmax(x)
            view[_LOW].copy_(low)
            view[_HIGH].copy_(high)
        block.count += 1

    def _settle_in(self, block: Block, device: torch.device) -> None:
        """The block's place in the buffer of the device on which its output lies."""
        buffer = self._buffers.get(device)
        if buffer is None:
            buffer = torch.zeros(SLOTS, len(self._blocks), _FIELDS, device=device)
            self._buffers[device] = buffer
        block.device = device
        block.views = [[buffer[k, block.index, f] for f in range(_FIELDS)] for k in range(SLOTS)]

    # -- at the gate ---------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        """Hand over what was written since the last step."""
        here = self.thread.here
        if here.open or here.waiting or here.learning:
            self._end()  # the forward has raised, or was left by another door
        self._taken, self._vectors = [], []
        self._reduce_kept()
        wanted = (step + 1) % self._every == 0
        for device, buffer in self._buffers.items():
            blocks = [b for b in self._blocks if b.count and b.device == device]
            used = max((b.count for b in blocks), default=0)
            if used:
                state = np.array(
                    [(b.index, b.row, b.count, b.numel, b.spread) for b in blocks], dtype=np.intp
                )
                self._taken.append((used, state))
                # A copy: the next forward may begin before it is read.
                self._vectors.append(buffer[:used].flatten().clone())
        for block in self._blocks:
            block.count = block.numel = 0
            block.spread = block.seen = False
            block.wanted = wanted
            block.lone = block.small and not wanted
        self._gates += 1
        if self._taken or self._small:
            self._steps += 1

    def _reduce_kept(self) -> None:
        """Small outputs, all of one shape together."""
        self._small = []
        blocks: list[Block] = []
        outputs: list[Tensor] = []
        for block in self._blocks:
            x = block.kept
            if x is None:
                continue
            block.kept = None
            if x._version != block.kept_version:  # somebody wrote into it: from now on at once
                block.small = False
            elif block.count or x.dtype != torch.float32 or not x.numel():
                self._take(block, x)  # it joins the micro-batches that came after it
            else:
                blocks.append(block)
                outputs.append(x)
        if not blocks:
            return
        try:  # one shape is the usual case, and asking each for its own is dearer than this
            self._reduce_alike(blocks, outputs)
        except RuntimeError:
            groups: dict[tuple[Any, ...], list[int]] = {}
            for i, x in enumerate(outputs):
                groups.setdefault((x.shape, x.device), []).append(i)
            for alike in groups.values():
                self._reduce_alike([blocks[i] for i in alike], [outputs[i] for i in alike])

    def _reduce_alike(self, blocks: list[Block], outputs: list[Tensor]) -> None:
        stacked = torch.stack(outputs).reshape(len(outputs), -1)  # 0-d too
        norm = torch.linalg.vector_norm(stacked, dim=1)
        # aminmax(dim=1) takes ten times as long as these two.
        self._vectors.append(torch.cat((norm, stacked.amin(1), stacked.amax(1))))
        self._small.append(([b.row for b in blocks], stacked.size(1)))
        for block in blocks:
            if block.device is None:
                block.device = stacked.device

    def pending(self) -> list[Tensor]:
        """The buffers, as far as they were used."""
        return self._vectors

    @np.errstate(invalid="ignore", over="ignore")  # nan and inf are what may come
    def parts(self, values: Sequence[Float64]) -> dict[str, Float64]:
        """Sums and maxima of each row."""
        self._vectors = []
        if not values:
            return {}
        L = len(self._table)
        squares, count = np.zeros((2, L))
        largest, spread = np.full((2, L), NOT_MEASURED)
        few = len(self._small)
        for (rows, numel), value in zip(self._small, values[:few], strict=True):
            norm, low, high = value.reshape(3, -1)
            np.add.at(squares, rows, np.square(norm))
            np.add.at(count, rows, numel)
            np.maximum.at(largest, rows, np.maximum(high, -low))
        for (used, state), value in zip(self._taken, values[few:], strict=True):
            index, row, slots, numels, has_spread = state.T
            own = value.reshape(used, -1, _FIELDS)[:, index]
            if used == 1:  # the usual case: a line of numpy out of cold caches takes 5 us
                norm, low, high = own[0, :, : _HIGH + 1].T
                sums, most = np.square(norm), np.maximum(high, -low)
            else:
                there = (np.arange(used)[:, None] < slots)[:, :, None]
                sums = np.where(there, np.square(own), 0.0)[:, :, _NORM].sum(0)
                most = np.where(there, np.maximum(own, -own), NOT_MEASURED)
                most = most[:, :, _LOW : _HIGH + 1].max((0, 2))
            np.add.at(squares, row, sums)
            np.add.at(count, row, numels)
            np.maximum.at(largest, row, most)
            if has_spread.any():
                told = has_spread.astype(bool)
                np.maximum.at(spread, row[told], own[0, told, _SPREAD])
        return {SQUARES: squares, COUNT: count, LARGEST: largest, SPREAD: spread}

    def finish(self, parts: Parts) -> dict[str, Column]:
        """RMS, largest magnitude, and on sampled steps the spread."""
        if COUNT not in parts:
            return {}
        count = parts[COUNT]
        with np.errstate(invalid="ignore"):
            mean = np.sqrt(parts[SQUARES] / np.maximum(count, 1.0))
        rms = np.where(count > 0, mean, NOT_MEASURED)
        columns = {}
        for name, values in (
            (LAYER_ACTIVATION_RMS, rms),
            (LAYER_ACTIVATION_ABSMAX, parts[LARGEST]),
            (LAYER_ACTIVATION_SPREAD, parts[SPREAD]),
        ):
            found = column(values)
            if found is not None:
                columns[name] = found
        return columns

    def blind_spots(self) -> list[Unseen]:
        """Blocks whose output was never seen, or cannot be measured."""
        spots = []
        blind = [b for b in self._blocks if b.device is None and not b.trouble]
        for odd in dict.fromkeys(b.odd for b in blind if b.odd):
            names = [b.name for b in blind if b.odd == odd]
            spots.append(
                Unseen(
                    f"activations of {_names(names)} are not seen: what they put out is {odd}",
                    "a block's output is measured where it is a floating-point tensor, or a tuple, "
                    "list, dict or dataclass with one in it, or in one of its items",
                )
            )
        unseen = [b.name for b in blind if not b.odd]
        if unseen and (self._steps or self._gates > UNSEEN_AFTER):
            spots.append(Unseen(f"activations of {_names(unseen)} are not seen: {NEVER}", EARLIER))
        for trouble in dict.fromkeys(b.trouble for b in self._blocks if b.trouble):
            names = [b.name for b in self._blocks if b.trouble == trouble]
            spots.append(
                Unseen(
                    f"activations of {_names(names)} are not seen: {trouble}",
                    "the other signals are not touched by this",
                )
            )
        return spots

    def notes(self) -> list[str]:
        """Of blocks that put out several tensors: which one is measured."""
        said = []
        for picked in dict.fromkeys(b.picked for b in self._blocks if b.picked):
            names = [b.name for b in self._blocks if b.picked == picked]
            said.append(f"activations of {_names(names)} are those of their output's {picked}")
        return said


def _as_it_was(x: Tensor | None, version: int) -> TypeGuard[Tensor]:
    """It lives, because autograd needs it, and nobody has written into it or taken its memory."""
    try:
        return (
            x is not None
            and x._version == version
            and x.requires_grad
            and (x.data_ptr() != 0 or x.is_meta or not x.numel())
        )
    except RuntimeError:  # a transform of torch.func has ended
        return False


def _fold(block: Block) -> None:
    """All slots into the first, so that there is room for one more micro-batch."""
    slots = block.views
    norms = torch.stack([v[_NORM] for v in slots])
    lows = torch.stack([v[_LOW] for v in slots])
    highs = torch.stack([v[_HIGH] for v in slots])
    slots[0][_NORM].copy_(torch.linalg.vector_norm(norms))
    slots[0][_LOW].copy_(lows.amin())
    slots[0][_HIGH].copy_(highs.amax())
    block.count = 1


def _blocks(models: Sequence[nn.Module], table: LayerTable) -> tuple[list[nn.Module], list[Block]]:
    found: list[tuple[str, nn.Module]] = []
    for model in models:
        known = table.blocks_of(model) or _numbered(model)
        found += known or [(n, m) for n, m in model.named_children()]
    rows = [(name, module, table.rows_under(module)) for name, module in found]
    rows = [(name, module, own) for name, module, own in rows if own]
    if len(rows) > MOST:
        rows = [rows[i * len(rows) // MOST] for i in range(MOST)]
    made: list[Block] = []
    modules: list[nn.Module] = []
    for name, module, own in rows:
        device = capture.home(module.parameters())
        made.append(Block(name, own[-1], len(made), capture.slots(device, 1)[0]))
        modules.append(module)
    return modules, made


def _numbered(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children with a number for a name, outermost first, none inside another."""
    found: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, prefix: str) -> None:
        listed = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if listed and name.isdigit():
                found.append((path, child))
            else:
                walk(child, path + ".")

    walk(model, "")
    return found


def _names(names: Sequence[str]) -> str:
    few = ", ".join(names[:3])
    return few if len(names) <= 3 else f"{few} and {len(names) - 3} more"
