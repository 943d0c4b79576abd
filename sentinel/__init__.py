"""sentinel: watch a PyTorch run, and undo the step that broke it.

This package is torch-free. `attach` is the one door to the torch side
(`sentinel_hooks`), opened only when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sentinel.core.policy import Policy

if TYPE_CHECKING:
    from sentinel_hooks import Session

__version__ = "0.1.0"
__all__ = ["Policy", "__version__", "attach"]


def attach(trainer: Any = None, **options: Any) -> Session:
    """Attach sentinel to `trainer`; see `sentinel_hooks.attach` for the options.

    Raises:
        ImportError: torch is not installed here.
    """
    try:
        from sentinel_hooks import attach as attach_hooks
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "sentinel.attach() runs in the training process and needs torch, which is not "
            "installed here; install it with: pip install 'torch-sentinel[hooks]'"
        ) from error
    return attach_hooks(trainer, **options)
