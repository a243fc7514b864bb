"""One shared-memory segment with its two semaphores: creation, attachment, unlinking, and the heartbeat words in it.

Owns the names in /dev/shm. Knows the segment header, not what the records mean. Never multiprocessing.shared_memory:
its resource tracker unlinks segments that are still in use.
"""

import contextlib
import errno
import mmap
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import posix_ipc

from ringserve.shm_transport import process
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import (
    SegmentError,
    SegmentMismatchError,
    SegmentMissingError,
    SharedMemoryFullError,
)
from ringserve.shm_transport.layout import step_columns, struct_of
from ringserve.shm_transport.records import LAYOUT_VERSION, MAGIC, RECORD_HEADER, SEGMENT_HEADER, RingKind

_HEADER = struct_of(SEGMENT_HEADER)
_SHM_DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"(?:sem\.)?ringserve-(\d+)-(\d+)-[0-9a-f]+-\w+(?:-\w+)?")


@dataclass(slots=True, kw_only=True, frozen=True)
class SegmentHeader:
    """The creator's line of a segment header; what both sides must agree on."""

    ring: RingKind
    num_slots: int
    slot_bytes: int
    epoch: int
    max_rows: int = 0
    max_tokens: int = 0
    max_logprob_entries: int = 0

    @property
    def segment_bytes(self) -> int:
        """Size of the whole segment."""
        return SEGMENT_HEADER.itemsize + self.num_slots * self.slot_bytes

    def pack(self) -> bytes:
        """Return the header's bytes, heartbeat words zero."""
        return _HEADER.pack(
            MAGIC, LAYOUT_VERSION, self.ring, self.num_slots, self.slot_bytes, self.segment_bytes, self.epoch,
            self.max_rows, self.max_tokens, self.max_logprob_entries, 0, 0, 0, 0, 0,
        )  # fmt: skip


@dataclass(slots=True, frozen=True)
class Segment:
    """A mapped segment with its semaphores. `map` is the memory; `filled` and `free` count slots."""

    name: str
    header: SegmentHeader
    map: mmap.mmap
    filled: posix_ipc.Semaphore
    free: posix_ipc.Semaphore

    def slot(self, index: int) -> memoryview:
        """Return the bytes of one slot."""
        start = SEGMENT_HEADER.itemsize + index * self.header.slot_bytes
        return memoryview(self.map)[start : start + self.header.slot_bytes]

    def unlink(self) -> None:
        """Remove the three names; the memory lives on for those who have mapped it. Safe to call twice."""
        unlink_names(self.name)

    def close(self) -> None:
        """Give the semaphores back. The memory goes with the last numpy view of it."""
        self.filled.close()
        self.free.close()


def new_base_name() -> str:
    """Return a name that says whose the segments are: /ringserve-PID-STARTTIME-RANDOM."""
    pid = os.getpid()
    return f"/ringserve-{pid}-{process.start_time(pid)}-{secrets.token_hex(4)}"


def new_epoch() -> int:
    """Return a number that no earlier ring had, for the engine to prove that it attached to the right one."""
    return secrets.randbits(63) | 1


def step_header(config: RingConfig, epoch: int) -> SegmentHeader:
    """Return the header of a step ring (engine to server)."""
    return SegmentHeader(
        ring=RingKind.STEP, num_slots=config.num_step_slots, slot_bytes=config.step_slot_bytes, epoch=epoch,
        max_rows=config.max_rows, max_tokens=config.max_tokens, max_logprob_entries=config.max_logprob_entries,
    )  # fmt: skip


def request_header(config: RingConfig, epoch: int) -> SegmentHeader:
    """Return the header of a request ring (server to engine)."""
    return SegmentHeader(
        ring=RingKind.REQUEST, num_slots=config.num_request_slots, slot_bytes=config.request_slot_bytes, epoch=epoch
    )


def create(name: str, header: SegmentHeader) -> Segment:
    """Create a segment and its semaphores under a new name, readable by this user alone, every page reserved.

    Raises:
        SharedMemoryFullError: If /dev/shm has less room than the segment needs (a SIGBUS later, were it not reserved).
        SegmentError: If the name exists, or the kernel refuses.
    """
    try:
        shm = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    except (posix_ipc.Error, OSError, ValueError) as exc:
        raise _creation_error(name, header, exc) from exc
    try:
        os.posix_fallocate(shm.fd, 0, header.segment_bytes)
        memory = mmap.mmap(shm.fd, header.segment_bytes)
        filled = posix_ipc.Semaphore(f"{name}-filled", posix_ipc.O_CREX, mode=0o600, initial_value=0)
        free = posix_ipc.Semaphore(f"{name}-free", posix_ipc.O_CREX, mode=0o600, initial_value=header.num_slots)
    except BaseException as exc:
        unlink_names(name)
        if isinstance(exc, posix_ipc.Error | OSError):
            raise _creation_error(name, header, exc) from exc
        raise
    finally:
        shm.close_fd()
    memory[: SEGMENT_HEADER.itemsize] = header.pack()
    return Segment(name, header, memory, filled, free)


def attach(name: str, ring: RingKind, epoch: int) -> Segment:
    """Map an existing segment.

    Raises:
        SegmentMissingError: If there is no segment of that name, or no semaphores.
        SegmentMismatchError: If it is not a ring of this layout, direction, geometry and epoch.
        SegmentError: If the kernel refuses, or the name is not that of a plain file.
    """
    try:
        shm = posix_ipc.SharedMemory(name)
    except posix_ipc.ExistentialError as exc:
        raise SegmentMissingError(
            f"there is no shared-memory segment {name}: its creator is gone, or runs in another namespace"
        ) from exc
    except (posix_ipc.Error, OSError, ValueError) as exc:
        raise SegmentError(f"cannot open the shared-memory segment {name}: {exc}") from exc
    try:
        size = os.fstat(shm.fd).st_size
        header = _read_header(os.pread(shm.fd, SEGMENT_HEADER.itemsize, 0), size, name)
        memory = mmap.mmap(shm.fd, size)
    except (OSError, ValueError) as exc:
        raise SegmentError(f"cannot map the shared-memory segment {name}: {exc}") from exc
    finally:
        shm.close_fd()
    _expect(name, "ring", header.ring, ring)
    _expect(name, "epoch", header.epoch, epoch)
    try:
        filled, free = posix_ipc.Semaphore(f"{name}-filled"), posix_ipc.Semaphore(f"{name}-free")
    except posix_ipc.ExistentialError as exc:
        raise SegmentMissingError(f"the segment {name} has lost its semaphores: its creator is shutting down") from exc
    except (posix_ipc.Error, OSError, ValueError) as exc:
        raise SegmentError(f"cannot open the semaphores of the segment {name}: {exc}") from exc
    return Segment(name, header, memory, filled, free)


def unlink_names(name: str) -> None:
    """Unlink a segment's three names; those that are gone already are fine."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
    for semaphore in (f"{name}-filled", f"{name}-free"):
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_semaphore(semaphore)


def unlink_stale(directory: Path = _SHM_DIRECTORY) -> list[str]:
    """Remove what servers that were killed before their engine attached have left; return the removed file names.

    Raises:
        SegmentError: If the directory, without which there is no shared memory, cannot be read.
    """
    removed = []
    try:
        paths = [*directory.iterdir()]
    except OSError as exc:
        raise SegmentError(f"there is no shared memory: {exc}; mount a tmpfs at {directory}") from exc
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match and not process.is_alive(int(match[1]), int(match[2])):
            with contextlib.suppress(OSError):  # another user's, or another start removed it first
                path.unlink()
                removed.append(path.name)
    return removed


def _creation_error(name: str, header: SegmentHeader, exc: Exception) -> SegmentError:
    """Return what an error of the kernel's means; a full /dev/shm has no room for a name or a semaphore either."""
    if not isinstance(exc, OSError) or exc.errno != errno.ENOSPC:
        return SegmentError(f"cannot create the shared-memory segment {name} of {header.segment_bytes} bytes: {exc}")
    free = os.statvfs(_SHM_DIRECTORY)
    num_files = f" and {free.f_favail} files" if free.f_files else ""  # 0: it counts none
    return SharedMemoryFullError(
        f"the ring needs {header.segment_bytes} bytes of shared memory and 3 files, {_SHM_DIRECTORY} has "
        f"{free.f_bavail * free.f_frsize} bytes{num_files} free: enlarge it (docker: --shm-size), or clean it up"
    )


def _read_header(data: bytes, file_bytes: int, name: str) -> SegmentHeader:
    if len(data) < SEGMENT_HEADER.itemsize:
        raise SegmentMismatchError(f"{name} has {len(data)} bytes, a ring's header alone {SEGMENT_HEADER.itemsize}")
    magic, version, ring, num_slots, slot_bytes, segment_bytes, epoch, rows, tokens, entries = _HEADER.unpack(data)[:10]
    _expect(name, "magic", magic, MAGIC)
    _expect(name, "version", version, LAYOUT_VERSION)
    if ring not in list(RingKind):
        raise SegmentMismatchError(f"{name}: ring is {ring}, expected one of {[int(kind) for kind in RingKind]}")
    header = SegmentHeader(
        ring=RingKind(ring), num_slots=num_slots, slot_bytes=slot_bytes, epoch=epoch,
        max_rows=rows, max_tokens=tokens, max_logprob_entries=entries,
    )  # fmt: skip
    _expect(name, "segment_bytes", segment_bytes, header.segment_bytes)
    _expect(name, "file size", file_bytes, header.segment_bytes)
    needed = step_columns(rows, tokens, entries)[1] if ring == RingKind.STEP else RECORD_HEADER.itemsize + 1
    if num_slots < 1 or slot_bytes < needed:
        raise SegmentMismatchError(f"{name}: {num_slots} slots of {slot_bytes} bytes, expected 1 or more of {needed}")
    return header


def _expect(name: str, what: str, value: int, expected: int) -> None:
    if value != expected:
        raise SegmentMismatchError(f"{name}: {what} is {value:#x}, expected {expected:#x}")
