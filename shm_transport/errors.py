"""Errors of the transport, named by whose fault they are.

TransportError
├── SegmentError            the segment is not what the caller expects (also OSError's kin at the boundary)
│   ├── SegmentMissingError     no segment of that name
│   ├── SegmentMismatchError    wrong magic, version, size, geometry or epoch
│   └── SharedMemoryFullError   /dev/shm has no room for the rings
├── RecordError             a record breaks the protocol
│   ├── RecordTooLargeError     the caller's record does not fit a slot (ValueError)
│   └── SequenceError           a gap, an over-posted semaphore, a torn or foreign record
└── PeerDiedError           the process at the other end is gone
"""


class TransportError(Exception):
    """Base of every error that this package raises."""


class SegmentError(TransportError):
    """The shared segment is not what the caller expects."""


class SegmentMissingError(SegmentError):
    """There is no segment of that name: the creator is gone, or lives in another namespace."""


class SegmentMismatchError(SegmentError):
    """The segment's magic, version, size, geometry or epoch differs from what was expected."""


class SharedMemoryFullError(SegmentError):
    """/dev/shm has less free space than the rings need."""


class RecordError(TransportError):
    """A record breaks the protocol of the ring."""


class RecordTooLargeError(RecordError, ValueError):
    """A record exceeds what one slot can hold."""


class SequenceError(RecordError):
    """A record's sequence number, kind or counts are not the ones that must come next."""


class PeerDiedError(TransportError):
    """The process at the other end of the ring has died; what it had posted was drained first."""
