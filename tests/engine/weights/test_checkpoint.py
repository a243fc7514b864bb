import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ringserve.engine.errors import ModelLoadError, ModelNotFoundError, NotEnoughMemoryError
from ringserve.engine.weights import checkpoint
from ringserve.engine.weights.checkpoint import Checkpoint, checkpoint_dtype, read_config, weight_files

CPU = torch.device("cpu")
WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2), "b.weight": torch.zeros(4)}


def open_checkpoint(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(str(path), dtype=dtype, device=CPU)


@pytest.fixture(params=["one file", "shards"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "one file":
        save_file(WEIGHTS, tmp_path / "model.safetensors")
        return tmp_path
    shards = {"a.weight": "model-1.safetensors", "a.bias": "model-2.safetensors", "b.weight": "model-2.safetensors"}
    for shard in set(shards.values()):
        save_file({name: WEIGHTS[name] for name in shards if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return tmp_path


def test_weights_come_by_name_in_the_dtype_asked_for(directory: Path) -> None:
    opened = open_checkpoint(directory, torch.bfloat16)
    assert torch.equal(opened.take("a.weight", 2, 3), WEIGHTS["a.weight"].bfloat16())
    assert "b.weight" in opened
    assert "b.bias" not in opened
    assert opened.find("b.bias", 4) is None
    found = opened.find("a.bias", 2)
    assert found is not None
    assert found.dtype == torch.bfloat16
    opened.close()


def test_a_missing_weight_and_one_of_another_shape_are_named(directory: Path) -> None:
    opened = open_checkpoint(directory)
    with pytest.raises(ModelLoadError, match=r"lack c\.weight: download it again"):
        opened.take("c.weight", 1)
    with pytest.raises(ModelLoadError, match=r"a\.weight of .* is \[2, 3\], its config\.json says \[3, 2\]"):
        opened.take("a.weight", 3, 2)


def test_a_missing_shard_is_named(directory: Path) -> None:
    (directory / "model-1.safetensors").unlink(missing_ok=True)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(
        ModelLoadError, match=r"lacks model-1\.safetensors, which model\.safetensors\.index\.json names"
    ):
        weight_files(str(directory))


@pytest.mark.parametrize("damage", [b"\x08\0\0\0\0\0\0\0{broken}", b"", b"\xff" * 64])
def test_a_damaged_file_is_named(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read .*: download it again"):
        open_checkpoint(tmp_path)


def test_a_truncated_file_is_named(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        open_checkpoint(directory)


def test_a_directory_without_safetensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no model\.safetensors"):
        open_checkpoint(tmp_path)


def test_weights_larger_than_the_free_memory_are_refused_with_both_sizes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "free_bytes", lambda _device: 10)
    with pytest.raises(NotEnoughMemoryError, match="need 0 MiB, 0 MiB are free: free memory"):
        open_checkpoint(directory)


def test_a_config_is_found_or_its_lack_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere is no directory: name a local Hugging Face model"):
        read_config(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        read_config(str(tmp_path))
    for broken in ("{not json", "[1]"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(ModelLoadError, match="cannot be read"):
            read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({}, None),
        ({"dtype": "nn"}, None),
        ({"dtype": 5}, None),
    ],
)
def test_the_dtype_is_the_configs(config: dict[str, object], dtype: torch.dtype | None) -> None:
    assert checkpoint_dtype(config) == dtype
