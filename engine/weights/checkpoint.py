"""A Hugging Face directory read without transformers, whose import takes longer than loading a small model does.

Its config as plain JSON, its safetensors files tensor by tensor: at no time is there a second copy of the weights.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from ringserve.engine.errors import ModelLoadError, ModelNotFoundError, NotEnoughMemoryError
from ringserve.engine.memory import free_bytes

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_config(path: str) -> dict[str, Any]:
    """Return the model's config.json.

    Raises:
        ModelNotFoundError: If the directory or its config.json is missing.
        ModelLoadError: If it is no JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        what = "holds no config.json" if Path(path).is_dir() else "is no directory"
        raise ModelNotFoundError(f"{path} {what}: name a local Hugging Face model directory")
    return _read_json(file)


def weight_files(path: str) -> list[Path]:
    """Return the directory's safetensors files, or an empty list if its weights are in another format.

    Raises:
        ModelLoadError: If the index cannot be read or names a file that is not there.
    """
    directory = Path(path)
    if (directory / _INDEX).is_file():
        names = sorted(set(_read_json(directory / _INDEX).get("weight_map", {}).values()))
    else:
        names = [_SINGLE] if (directory / _SINGLE).is_file() else []
    for name in names:
        if not (directory / name).is_file():
            raise ModelLoadError(f"{path} lacks {name}, which {_INDEX} names: download it again")
    return [directory / name for name in names]


def check_memory(path: str, files: list[Path], device: torch.device) -> None:
    """Refuse a model whose weights are larger than the free memory.

    Raises:
        NotEnoughMemoryError: If they are.
    """
    needed, free = sum(file.stat().st_size for file in files), free_bytes(device)
    if needed > free:
        raise NotEnoughMemoryError(
            f"the weights of {path} need {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free: "
            "free memory, or serve a smaller model"
        )


class Checkpoint:
    """The weights of a directory by name.

    Raises:
        ModelLoadError: If a file is missing or damaged.
    """

    def __init__(self, path: str, *, dtype: torch.dtype, device: torch.device) -> None:
        files = weight_files(path)
        if not files:
            raise ModelLoadError(f"{path} holds no {_SINGLE}: download it again, or convert it with save_pretrained()")
        check_memory(path, files, device)
        self._path, self._dtype, self._device = path, dtype, device
        self._files: dict[str, Any] = {}  # the open file that holds a name
        for file in files:
            try:
                opened: Any = safe_open(file, "pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
            except (SafetensorError, OSError) as exc:
                raise ModelLoadError(f"{file} cannot be read ({exc}): download it again") from exc
        self._progress = tqdm(total=len(self._files), desc="loading weights", unit="tensor", disable=None, leave=False)

    def close(self) -> None:
        """Take the progress bar from the terminal."""
        self._progress.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int) -> Tensor:
        """Read one weight, in the dtype and on the device that the checkpoint was opened for.

        Raises:
            ModelLoadError: If it is missing, damaged or of another shape.
        """
        if name not in self._files:
            raise ModelLoadError(f"the weights of {self._path} lack {name}: download it again")
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except SafetensorError as exc:
            raise ModelLoadError(f"{name} of {self._path} cannot be read ({exc}): download it again") from exc
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{name} of {self._path} is {list(tensor.shape)}, its config.json says {list(shape)}: download it again"
            )
        self._progress.update()
        return tensor.to(self._device, self._dtype)

    def find(self, name: str, *shape: int) -> Tensor | None:
        """Read a weight that need not be there.

        Raises:
            ModelLoadError: As `take`.
        """
        return self.take(name, *shape) if name in self else None


def checkpoint_dtype(config: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that the config names, None if it names none that torch has."""
    name = config.get("dtype") or config.get("torch_dtype")
    with suppress(AttributeError, TypeError):
        found = getattr(torch, name)  # type: ignore[arg-type]
        return found if isinstance(found, torch.dtype) else None
    return None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as exc:
        raise ModelLoadError(f"{file} cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} cannot be read: it is no JSON object")
    return content
