"""What the benchmarks start ends with them."""

import os
import subprocess
import sys
import time
from pathlib import Path

from ringserve.shm_transport import process

_MAKES_A_SERVER = """
import sys, time
from pathlib import Path
from benchmarks.processes import SyntheticServer
server = SyntheticServer(Path(sys.argv[1]))
assert server.port
print(server.pid, flush=True)
time.sleep(60)
"""


def test_a_benchmark_that_is_told_to_end_takes_its_server_along(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", _MAKES_A_SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    ) as benchmark:  # fmt: skip
        assert benchmark.stdout is not None
        server = int(benchmark.stdout.readline())
        (engine,) = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
        benchmark.terminate()
        benchmark.wait(10)
    deadline = time.monotonic() + 10
    while process.start_time(server) or process.start_time(engine):
        assert time.monotonic() < deadline
        time.sleep(0.01)
