from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringserve.engine.runner import check_cache

LOGITS = torch.randn(2, 5, 30)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def load(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Load once; returns whether the logits had to be made."""
    monkeypatch.setattr(check_cache, "default_cache_root", lambda: tmp_path / "cache")

    def load_once(dtype: torch.dtype = torch.float32) -> bool:
        made = []

        def make() -> Tensor:
            made.append(True)
            return LOGITS

        assert torch.equal(check_cache.load_or_make(str(model), dtype, [[1, 2]], make), LOGITS)
        return bool(made)

    return load_once


def test_logits_are_made_once(load: Callable[..., bool]) -> None:
    assert load()
    assert not load()


def test_another_dtype_config_or_weight_file_makes_them_anew(load: Callable[..., bool], model: Path) -> None:
    assert load()
    assert load(torch.bfloat16)
    (model / "config.json").write_text('{"model_type": "llama"}')
    assert load()
    (model / "model.safetensors").write_bytes(b"other weights")
    assert load()


def test_a_damaged_file_is_replaced_with_a_warning(
    load: Callable[..., bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    (file,) = (tmp_path / "cache" / "self_checks").iterdir()
    file.write_bytes(b"\x93NUMPY broken")
    assert load()
    assert "it is made anew" in caplog.text
    assert not load()


def test_a_cache_that_cannot_be_written_only_costs_time(
    load: Callable[..., bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert load()
    assert load()
    assert "the next start is as slow" in caplog.text


def test_old_files_are_dropped(load: Callable[..., bool], model: Path, tmp_path: Path) -> None:
    for number in range(check_cache._MAX_FILES + 3):
        (model / "config.json").write_text(str(number))
        load()
    assert len(list((tmp_path / "cache" / "self_checks").iterdir())) == check_cache._MAX_FILES
