"""Apart: what we compute in the user's forward is seen by nobody who watches the user's operations.

    with apart(x):
        best = x.detach().amax()

A TorchDispatchMode counts, stores or replays the operations that it sees: selective activation
checkpointing hands the n-th product of the forward to the n-th of the recomputation, so one of ours
in between gives the user's backward another layer's tensors. A TorchFunctionMode and a subclass's
__torch_function__ may do as they please with what they see. None of them is in force inside.

Cost: two questions to torch where nobody watches, 0.1 us; 21 us under a TorchDispatchMode
      (measured at a load of 6 on 2 cores).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import has_torch_function_unary
from torch.utils._python_dispatch import _disable_current_modes

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_NOBODY: AbstractContextManager[Any] = nullcontext()


def is_watched(x: Any) -> bool:
    """Somebody would see what is done with `x`."""
    return has_torch_function_unary(x) or dispatch_modes() > 0


def apart(x: Any) -> AbstractContextManager[Any]:
    """Where nobody sees what is done with `x`."""
    return _Apart() if is_watched(x) else _NOBODY


class _Apart:
    def __enter__(self) -> None:
        self._modes: Any = _disable_current_modes() if dispatch_modes() else None
        if self._modes is not None:
            self._modes.__enter__()
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        if self._modes is not None:
            self._modes.__exit__(*error)
