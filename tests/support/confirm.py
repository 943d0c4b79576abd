"""Read a snapshot with torch, json and zlib only; nothing of sentinel's is imported here.

    python tests/support/confirm.py SNAPSHOT_DIRECTORY      prints a digest of what it holds

It is the documentation of the format that runs: checksums first, then the tensors.
"""

import hashlib
import json
import sys
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def read(directory: Path, rank: int = 0) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors by name, whole whoever wrote them; and everything else, as one rank had it."""
    assert (directory / "COMMIT").exists(), "torn"
    commit = json.loads((directory / "COMMIT").read_text())["sealed"]
    files = list(commit.get("files", []))  # of all ranks together
    assert len(commit["manifests"]) == commit["ranks"]
    for entry in commit["manifests"]:
        files += [entry, *json.loads((directory / entry["name"]).read_bytes())["files"]]
    for file in files:
        data = (directory / file["name"]).read_bytes()
        assert (len(data), f"{zlib.crc32(data):08x}") == (file["size"], file["crc32"]), file
    reader = dcp.FileSystemReader(directory)
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in reader.read_metadata().state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process, no torch.distributed: meant
        dcp.load(tensors, storage_reader=reader)
    rest = torch.load(directory / f"rank-{rank}.pt", weights_only=False)
    return tensors, rest


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of names and values."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous().reshape(-1)
        h.update(name.encode() + value.view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


if __name__ == "__main__":
    tensors, rest = read(Path(sys.argv[1]))
    print(json.dumps({"step": rest["step"], "digest": digest(tensors)}))
