import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringserve.server.errors import StartupError
from ringserve.server.settings import model_path
from ringserve.shm_transport import process

PULL = """
import signal, sys
from ringserve.server.settings import model_path
signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
model_path.sys.executable = sys.argv[1]
model_path.pull_default_model()
"""


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_signal_during_the_pull_ends_it_with_a_chance_to_clean_up(tmp_path: Path) -> None:
    begun, cleaned = tmp_path / "begun", tmp_path / "cleaned"
    fake = script(
        tmp_path / "python", f"trap 'echo > {cleaned}; exit 1' TERM; echo $$ > {begun}; while :; do sleep 0.05; done"
    )
    server = subprocess.Popen([sys.executable, "-c", PULL, str(fake)])
    deadline = time.monotonic() + 30
    while not (begun.exists() and begun.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.terminate()
    assert server.wait(timeout=30) == 128 + signal.SIGTERM
    assert cleaned.exists()
    assert process.start_time(int(begun.read_text())) is None


def test_a_signal_while_the_pull_is_launched_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path.sys, "executable", str(script(tmp_path / "python", "while :; do sleep 0.05; done")))
    popen, launched = subprocess.Popen, list[subprocess.Popen[str]]()

    def launch(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        launched.append(popen(*arguments, **options))
        signal.raise_signal(signal.SIGTERM)
        return launched[0]

    monkeypatch.setattr(model_path.subprocess, "Popen", launch)
    previous = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    with pytest.raises(SystemExit):
        model_path.pull_default_model()
    signal.signal(signal.SIGTERM, previous)
    assert launched[0].returncode == -signal.SIGTERM


def test_a_pull_that_fails_is_an_error_of_start_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path.sys, "executable", str(script(tmp_path / "python", "exit 2")))
    with pytest.raises(StartupError, match="status 2"):
        model_path.pull_default_model()


@pytest.mark.parametrize("model", ["", "/nowhere/at/all", "./nowhere", "a b", "nowhere"])
def test_what_is_no_model_is_named(model: str) -> None:
    with pytest.raises(StartupError, match=f"model is {model!r}"):
        model_path.resolve(model)
