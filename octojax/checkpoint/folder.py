"""The folder of a checkpoint: one writer at a time, nothing foreign touched, leftovers removed."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from octojax.errors import FormatError

LOCK = "octojax.lock"

TREE = re.compile(r"tree(-[0-9a-f]{8})?")
"""The names of folders of data in a checkpoint."""

PART = re.compile(r"(process-\d+)?")
"""The names of folders of one process's data in them; "" where one process has written all."""

_ORBAX = re.compile(
    r"(process-\d+/)?(_METADATA|_CHECKPOINT_METADATA|_sharding|commit_success\.txt"
    r"|(array_metadatas|d|ocdbt\.process_\d+)/.*|manifest\.ocdbt.*)"
)
"""The files that Orbax writes to a folder of its own."""


def local_folder(path: str | Path) -> Path:
    """Returns the absolute path, `~` and symbolic links resolved.

    Raises `ValueError` for the address of something that is no local folder, for an empty path and
    for links that lead nowhere; `TypeError` for what is no path.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise TypeError(
            f"the path of a checkpoint is of type {type(path).__name__}, expected str or Path"
        ) from None
    if not text.strip() or "\0" in text:
        raise ValueError(
            f"{text!r} cannot be the folder of a checkpoint: "
            + ("it has a null byte" if "\0" in text else "it is empty; the working folder is '.'")
        )
    if re.match(r"[A-Za-z][\w+.-]*://", text):
        raise ValueError(
            f"{text} is an address, and checkpoints are written to folders of this machine. Save "
            f"to one, and copy the whole folder"
        )
    try:
        folder = Path(text).expanduser().resolve()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            folder.stat()  # Python 3.13 resolves links in a circle to themselves
        return folder
    except (RuntimeError, OSError) as error:  # links in a circle; a user that does not exist
        raise ValueError(f"{text!r} cannot be the folder of a checkpoint: {error}") from None


@contextlib.contextmanager
def plain_path(path: Path) -> Iterator[Path]:
    """Yields `path` by a name that Orbax and TensorStore take as it stands.

    Orbax looks for what it wrote with `glob`, to which `lr[1e-3]` is a pattern that does not match
    itself, and TensorStore reads a backslash as a slash: both then leave a checkpoint without data.
    """
    if not re.search(r"[\\\[\]*?]", str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="octojax-") as link:
        (Path(link) / "to").symlink_to(path.parent, target_is_directory=True)
        yield Path(link) / "to" / path.name


@contextlib.contextmanager
def sole_writer(root: Path) -> Iterator["Lock"]:
    """Within it no other process or thread writes to the checkpoint in `root`.

    Raises `FileExistsError` naming the writer if there is one.
    """
    path = root / LOCK
    file = _lock(path)
    with os.fdopen(file, "r+", encoding="utf-8") as stream:
        lock = Lock(root, stream)
        try:
            yield lock
        finally:
            if lock.tidied or not lock.unfinished():  # else the next writer removes what is left
                path.unlink()


class Lock:
    """The right to write to a checkpoint, and the note of what its owner is about to leave."""

    def __init__(self, root: Path, stream: IO[str]) -> None:
        self.root, self.stream = root, stream
        self.tidied = False

    def note(self, writes: str, replaces: str | None) -> None:
        """Says which folders of data are written and replaced, should the process be killed."""
        record = {
            "process": os.getpid(),
            "machine": platform.node(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "folders": [writes, *([replaces] if replaces else [])],
        }
        self.tidied = False
        self.stream.seek(0)
        self.stream.truncate()
        self.stream.write(json.dumps(record))
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def unfinished(self) -> list[str]:
        """Returns the folders of the last note, this writer's or that of one that was killed."""
        folders = _record(self.root / LOCK).get("folders", [])
        return [f for f in folders if isinstance(f, str) and TREE.fullmatch(f)]

    def tidy(self, valid: str | None) -> None:
        """Removes the data of the last note but for the folder that the index names."""
        for name in self.unfinished():
            if name != valid:
                _remove_data(self.root / name)
                unfinished = "*.orbax-checkpoint-tmp*"
                for folder in (
                    *self.root.glob(f"{name}.orbax-checkpoint-tmp*"),
                    *(self.root / name).glob(f"process-{unfinished}"),
                ):
                    shutil.rmtree(folder)
                with contextlib.suppress(OSError):
                    (self.root / name).rmdir()
        self.tidied = True


def _lock(path: Path) -> int:
    """Opens and locks the file, which its owner may be about to remove."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _claim(file, path)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _claim(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        busy = True
    except OSError as error:  # a file system without locks: what the file says must do
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        busy = _lives(_record(path))
    if busy:
        raise FileExistsError(
            f"{path.parent} is being written by {_owner(_record(path))}. Wait for it, or save to "
            f"another path"
        )


def _owner(record: dict[str, Any]) -> str:
    process, machine = record.get("process", "?"), record.get("machine", "?")
    return f"process {process} on {machine} since {record.get('since', '?')}"


def _lives(record: dict[str, Any]) -> bool:
    """Whether the process in a lock may be there still; on another machine nobody knows."""
    if "process" not in record:
        return False
    if record.get("machine") != platform.node():
        return True
    try:
        os.kill(int(record["process"]), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _record(path: Path) -> dict[str, Any]:
    """Returns what a lock says of its owner; nothing if it says nothing that can be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def writer_of(root: Path) -> str:
    """Returns which process is writing to the checkpoint just now; nothing if none is."""
    record = _record(root / LOCK)
    return _owner(record) if record and _lives(record) else ""


def _remove_data(folder: Path) -> None:
    """Removes the files that Orbax wrote to `folder`, and folders that are empty then.

    What else someone has put there stays, and so does a link.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.rmdir()
        elif _ORBAX.fullmatch(path.relative_to(folder).as_posix()):
            path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def sync(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file in `folder`, by its path there, once all is on the disk."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(folder).as_posix()] = digest
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)
    sync_folder(folder.parent)
    return digests


def verify(folder: Path, digests: Mapping[str, str]) -> None:
    """Raises `FormatError` naming every file that is missing or has other bytes than it had."""
    wrong = []
    for name, digest in digests.items():
        try:
            with open(folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    wrong.append(f"{folder / name} has other bytes than were written")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            wrong.append(f"{folder / name} is missing")
    if wrong:
        raise FormatError(
            f"the checkpoint {folder.parent} is damaged: {'; '.join(wrong)}. Load another one"
        )


def sync_folder(folder: Path) -> None:
    """Returns when the names in `folder` are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
