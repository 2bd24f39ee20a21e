"""What a model's files mean, as one number: two directories of the same content have the same fingerprint."""

import hashlib

from specq.models.checkpoint import Checkpoint
from specq.models.directory import INDEX

WHOLE_FILE = 64 << 20  # bytes up to which a weight file is hashed whole
SAMPLE = 4096  # bytes taken at the beginning, middle and end of every tensor beyond that
STRIDE = 1 << 20  # bytes between the samples of a GGUF file beyond that, behind its metadata


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 over what a model directory means: the same on every machine, whatever its path and file times.

    All JSON, template and tokenizer files count whole (a GGUF file holds its own). Weight files count whole up to 64 MB;
    larger ones by their header and the first, middle and last 4 KiB of every tensor: training, fine-tuning, merging or
    quantizing again changes those, and reading 140 GB for every study would take minutes. Of larger GGUF files the first
    64 MB, metadata included, count whole, then 4 KiB of every MiB. A single changed element inside a large tensor can go
    unseen.
    """
    digest = hashlib.sha256()
    kinds = ("*.json", "*.jinja", "*.model", "*.txt")
    beside = () if checkpoint.is_gguf else {p for kind in kinds for p in checkpoint.directory.glob(kind)}
    for path in sorted(beside):
        if path.is_file() and path.name != INDEX:
            _add(digest, path.name.encode(), path.read_bytes())
    for path in checkpoint.files:
        with path.open("rb") as file:
            if path.stat().st_size <= WHOLE_FILE:
                _add(digest, path.name.encode(), file.read())
                continue
            if checkpoint.is_gguf:
                _add(digest, path.name.encode(), file.read(WHOLE_FILE))
                for at in range(WHOLE_FILE, path.stat().st_size, STRIDE):
                    file.seek(at)
                    digest.update(file.read(SAMPLE))
                continue
            length = int.from_bytes(file.read(8), "little")
            _add(digest, path.name.encode(), file.read(length))
            for tensor in (t for t in checkpoint.tensors.values() if t.file == path):
                for at in (tensor.start, (tensor.start + tensor.end) // 2, max(tensor.start, tensor.end - SAMPLE)):
                    file.seek(at)
                    digest.update(file.read(min(SAMPLE, tensor.end - at)))
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", name: bytes, content: bytes) -> None:
    digest.update(len(name).to_bytes(8, "little") + name + len(content).to_bytes(8, "little") + content)
