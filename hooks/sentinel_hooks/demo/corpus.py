"""Real text that every Python installation has: the sources of its standard library, as bytes.

    corpus = Corpus.load()
    inputs_BT, targets_BT = corpus.batch(seed, step, rows, length)

One file in eight is held out whole for validation: held-out bytes of a file that was trained on
would flatter the model. Which batch comes at which step depends on (seed, step) alone, so that
two runs of one seed read the same text whatever else happens to them.

Shapes:  B rows of T tokens, int64; a token is a byte. targets are inputs shifted by one.
Errors:  load() raises DemoError when the sources are not there (a zipped or stripped Python).
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from sentinel.core.errors import SentinelError

VOCABULARY = 256
# Only what every distribution ships: no tests, no tkinter, no generated tables of encodings.
PATTERNS = ("*.py", "asyncio/*.py", "email/*.py", "http/*.py", "unittest/*.py")
HELD_OUT_SHARE = 8
SPLIT_SEED = 7
MIN_BYTES = 1_000_000

Batch = tuple[torch.Tensor, torch.Tensor]


class DemoError(SentinelError):
    """The demo cannot go on; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training text and held-out text: uint8, one dimension each."""

    train: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def load(cls, folder: Path | None = None) -> Corpus:
        """The standard library's sources under `folder` (default: of this Python).

        Raises:
            DemoError: there are too few of them.
        """
        root = folder or Path(sysconfig.get_paths()["stdlib"])
        files = sorted(path for pattern in PATTERNS for path in root.glob(pattern))
        random.Random(SPLIT_SEED).shuffle(files)  # noqa: S311 - no secret
        count = len(files) // HELD_OUT_SHARE
        held_out, train = _read(files[:count]), _read(files[count:])
        if len(train) < MIN_BYTES:
            raise DemoError(
                f"the demo trains on Python's own sources and needs {MIN_BYTES:,} bytes of them, "
                f"but {root} has {len(train):,}; use a Python installed with its library sources"
            )
        return cls(train, held_out)

    def batch(self, seed: int, step: int, rows: int, length: int) -> Batch:
        """The training batch of this step: inputs and targets, [B, T] each."""
        return _cut(self.train, _generator(seed, step), rows, length)

    def validation(self, index: int, rows: int, length: int) -> Batch:
        """Batch `index` of the held-out files: the same for every run and seed."""
        return _cut(self.held_out, _generator(1_000, index), rows, length)


def garbage(seed: int, step: int, rows: int, length: int) -> Batch:
    """What a broken data pipeline delivers: bytes drawn uniformly, without any structure."""
    generator = _generator(seed + 500_000, step)
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def _read(files: list[Path]) -> torch.Tensor:
    data = bytearray(b"".join(path.read_bytes() for path in files))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _cut(text: torch.Tensor, generator: torch.Generator, rows: int, length: int) -> Batch:
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator).tolist()
    tokens = torch.stack([text[i : i + length + 1] for i in starts]).long()
    return tokens[:, :-1], tokens[:, 1:]
