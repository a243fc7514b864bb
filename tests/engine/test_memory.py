"""Free memory, of the machine and of control groups."""

from pathlib import Path

import pytest
import torch

from ringserve.engine import memory
from ringserve.engine.memory import free_bytes

CPU = torch.device("cpu")


def test_no_more_memory_is_free_than_the_process_control_groups_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(group: Path, limit: str, used: int) -> None:
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 1\ninactive_file 2000\nactive_file 4000\n")

    groups, own = tmp_path / "groups", tmp_path / "own"
    monkeypatch.setattr(memory, "_GROUPS", groups)
    monkeypatch.setattr(memory, "_OWN_GROUP", own)
    unlimited = free_bytes(CPU)
    own.write_text("4:memory:/other\n0::/system/ringserve\n")
    assert free_bytes(CPU) > unlimited // 2  # no such groups
    write(groups, "max", 0)
    write(groups / "system", "90000", 5000)
    write(groups / "system" / "ringserve", "max", 5000)
    assert free_bytes(CPU) == 87_000
    write(groups / "system" / "ringserve", "30000", 5000)
    assert free_bytes(CPU) == 27_000
    write(groups / "system" / "ringserve", "30000", 33_000)
    assert free_bytes(CPU) == 0
    own.write_text("0::/\n")  # as a container sees it
    write(groups, "50000", 5000)
    assert free_bytes(CPU) == 47_000
