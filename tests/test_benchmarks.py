"""What the benchmarks start ends with them, and what the comparison of two commits concludes."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.compare import MIN_PAIRS, Estimate, compare
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
        children = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
        assert children  # its engine, and the process that checks grammars
        benchmark.terminate()
        benchmark.wait(10)
    deadline = time.monotonic() + 10
    while any(map(process.start_time, (server, *children))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


_CELLS = """
import contextlib

@contextlib.contextmanager
def open_cells():
    print("this is no answer")
    yield {NAMES}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a benchmark `toy`, in which the newer commit is slower in one of two cells."""
    old = {"a": "lambda: {'us': 10.0}", "b": "lambda: {'us': 5.0}", "gone": "lambda: {'us': 1.0}"}
    new = {"a": "lambda: {'us': 12.0}", "b": "lambda: {'us': 5.0, 'more': 1.0}", "added": "lambda: {'us': 1.0}"}
    (tmp_path / "benchmarks").mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for cells in (old, new):
        names = "{" + ", ".join(f"{name!r}: {measure}" for name, measure in cells.items()) + "}"
        (tmp_path / "benchmarks" / "toy.py").write_text(_CELLS.replace("{NAMES}", names))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "--message", "a"], check=True)
    return tmp_path


def test_two_commits_are_compared_in_the_cells_and_figures_that_both_have(
    repository: Path,
) -> None:
    ratios = compare(repository, "HEAD~1", "toy", 6, "", Console(quiet=True))
    assert ratios == {("a", "us"): [1.2] * 6, ("b", "us"): [1.0] * 6}
    assert set(compare(repository, "HEAD~1", "toy", 6, "b", Console(quiet=True))) == {("b", "us")}
    list_worktrees = ["git", "-C", str(repository), "worktree", "list"]
    assert len(subprocess.check_output(list_worktrees, text=True).splitlines()) == 1
    with pytest.raises(SystemExit, match="no-such-ref cannot be checked out"):
        compare(repository, "no-such-ref", "toy", 6, "", Console(quiet=True))
    with pytest.raises(SystemExit, match=r"(?s)the benchmark of .* has failed:.*No module named 'benchmarks.other'"):
        compare(repository, "HEAD~1", "other", 6, "", Console(quiet=True))


def test_the_interval_holds_the_true_median_nineteen_times_in_twenty() -> None:
    draws = random.Random(1)
    num_held = 0
    for _ in range(2000):
        it = Estimate.of([draws.lognormvariate(0, 0.2) for _ in range(12)])
        assert it.low <= it.median <= it.high
        num_held += it.low <= 1 <= it.high
    assert 0.95 <= num_held / 2000 <= 0.99  # 12 ratios: 96.1 %


def test_six_ratios_give_the_widest_interval_and_five_give_none() -> None:
    assert MIN_PAIRS == 6
    assert Estimate.of([3.0, 1.0, 2.0, 4.0, 6.0, 5.0]) == Estimate(3.5, 1.0, 6.0)
    with pytest.raises(ValueError, match="5 ratios have no interval"):
        Estimate.of([1.0] * 5)
