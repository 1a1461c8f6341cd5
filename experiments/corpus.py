"""Text to train on, as bytes: by default this Python's own standard library."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
VOCABULARY = 256  # a token is a byte
LIMIT = 8 << 20  # bytes read at most


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and the last twentieth of the text, held out for evaluation."""

    source: str
    training: np.ndarray
    held_out: np.ndarray

    def batch(self, step: int, samples: int, length: int, seed: int) -> dict[str, np.ndarray]:
        """Returns `{"tokens": (samples, length + 1) int32}`, the same for equal arguments."""
        draws = np.random.default_rng((seed, step))
        return _samples(self.training, draws, samples, length)

    def evaluation(self, samples: int, length: int, number: int = 0) -> dict[str, np.ndarray]:
        """Returns a batch of the held-out text, the same for equal arguments."""
        return _samples(self.held_out, np.random.default_rng(number), samples, length)


def _samples(text: np.ndarray, draws: np.random.Generator, samples: int, length: int):
    starts = draws.integers(0, len(text) - length, samples)
    rows = starts[:, None] + np.arange(length + 1)[None, :]
    return {"tokens": text[rows].astype(np.int32)}


def load(path: str | None, length: int) -> Corpus:
    """Returns the text of a file, of all files of a folder, or of the standard library.

    Files are read in the order of their paths. Raises `ValueError` if there is too little.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path)
    if not folder.exists():
        raise ValueError(f"--data {path}: there is no such file or folder")
    text = bytearray()
    for file in _files(folder, only_python=path is None):
        text += file.read_bytes()[: LIMIT - len(text)]
        if len(text) >= LIMIT:
            break
    cut = len(text) - len(text) // 20
    if len(text) - cut < length + 2:
        raise ValueError(
            f"--data {folder}: found {len(text)} bytes, but a twentieth of it is held out and "
            f"must be longer than a sample of {length + 1}; give at least {20 * (length + 2)} "
            f"bytes or a smaller --length"
        )
    data = np.frombuffer(bytes(text), np.uint8)
    name = "the Python standard library's sources" if path is None else str(path)
    return Corpus(f"{name} ({len(text) / 2**20:.1f} MiB)", data[:cut], data[cut:])


def _files(folder: Path, only_python: bool) -> list[Path]:
    if folder.is_file():
        return [folder]
    found = folder.rglob("*.py" if only_python else "*")
    return sorted(
        file
        for file in found
        if not (only_python and SKIPPED & set(file.relative_to(folder).parts)) and file.is_file()
    )
