import os
import subprocess
import sys
import time

import pytest

from ringserve.shm_transport import process
from ringserve.shm_transport.process import PeerProcess


def test_a_peer_is_alive_until_it_ends_even_if_nobody_reaps_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = PeerProcess(child.pid)
    assert peer.is_alive()
    child.kill()
    deadline = time.monotonic() + 10
    while peer.is_alive():
        assert time.monotonic() < deadline
    child.communicate()
    assert not peer.is_alive()
    peer.close()


def test_a_peer_that_is_gone_cannot_be_watched() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError):
        PeerProcess(child.pid)


def test_a_pid_used_again_is_told_by_its_start_time() -> None:
    started = process.start_time(os.getpid())
    assert started is not None
    assert process.is_alive(os.getpid(), started)
    assert not process.is_alive(os.getpid(), started - 1)
