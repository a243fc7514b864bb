"""How much memory is free, of the machine or a GPU, and of the control groups that the process is in."""

from pathlib import Path

import torch

from ringserve.engine.errors import EngineConfigError

_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")  # control groups, version 2; in a container its own is at the top


def free_bytes(device: torch.device) -> int:
    """Return how much memory `device` has left.

    Raises:
        EngineConfigError: If the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *_rooms()])
    raise EngineConfigError("/proc/meminfo does not say how much memory is free: set kv_cache_tokens")


def _rooms() -> list[int]:
    """Return how much memory each control group that limits this process has left: beyond that it is killed."""
    try:
        lines = _OWN_GROUP.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    parts = Path(own).parts
    groups = [_GROUPS.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
    return [room for group in groups if (room := _room(group)) is not None]


def _room(group: Path) -> int | None:
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text().split()
    except OSError:  # the topmost group has no such files, nor has version 1
        return None
    if limit == "max":
        return None
    reclaimable = int(stat[stat.index("inactive_file") + 1])
    return max(int(limit) - used + reclaimable, 0)
