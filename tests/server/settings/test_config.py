import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from ringserve.engine.synthetic import SyntheticConfig
from ringserve.server.errors import StartupError, shown
from ringserve.server.settings.config import ServeConfig

TOKENIZER = Path("/models/a/tokenizer.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", -1), ("port", 65536), ("drain_timeout", -0.1), ("drain_timeout", float("inf")),
     ("drain_timeout", float("nan")), ("step_time_ms", -1.0), ("prefill_time_ms", float("nan")),
     ("max_num_queued_reqs", 0), ("max_body_mb", 0), ("tokens_per_step", 0), ("step_timeout", 0.5),
     ("embedding_size", 0), ("max_model_len", 0), ("max_num_seqs", -3), ("fail_after", -2),
     ("max_num_seqs", 2**63), ("port", 10**400), ("write_timeout", 1e300),
     ("target_gap_ms", 0.5), ("target_gap_ms", float("nan")), ("target_gap_ms", float("inf")),
     ("min_prefill_percent", -1), ("min_prefill_percent", 96)],
)  # fmt: skip
def test_a_value_out_of_its_range_is_refused_with_its_flag(name: str, value: float) -> None:
    with pytest.raises(
        StartupError, match=rf"^--{name.replace('_', '-')} is {re.escape(shown(value))}: at (least|most) "
    ):
        ServeConfig(**{name: value})


@pytest.mark.parametrize("name", ["pooling", "wait_strategy", "engine", "dtype", "device"])
def test_a_value_that_is_no_choice_is_refused_with_its_flag(name: str) -> None:
    with pytest.raises(StartupError, match=rf"^--{name.replace('_', '-')} is 'no': one of "):
        ServeConfig(**{name: "no"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 0), ("port", 65535), ("drain_timeout", 0.0), ("max_model_len", None), ("max_model_len", 1),
     ("max_num_seqs", 1), ("fail_after", -1), ("fail_after", 0), ("max_num_queued_reqs", 1), ("step_timeout", 1.0),
     ("target_gap_ms", 1.0), ("min_prefill_percent", 0), ("min_prefill_percent", 95)],
)  # fmt: skip
def test_a_value_at_its_limit_is_taken(name: str, value: Any) -> None:
    assert getattr(ServeConfig(**{name: value}), name) == value


def test_adapters_are_served_under_their_names_and_loaded_from_their_directories() -> None:
    config = ServeConfig(adapters=("sql=/adapters/sql", "odd=/a=b"))
    assert config.adapter_names == ("sql", "odd")
    told = config.engine_config(TOKENIZER)["model"]["adapters"]
    assert told == {"sql": "/adapters/sql", "odd": "/a=b"}
    assert "adapters" not in ServeConfig().engine_config(TOKENIZER)["model"]


@pytest.mark.parametrize(
    ("adapters", "message"),
    [(("sql",), "must be NAME=DIR"), (("sql=",), "must be NAME=DIR"), (("=dir",), "must be NAME=DIR"),
     (("a=1", "a=2"), "another model's already"), (("base=1",), "another model's already")],
)  # fmt: skip
def test_an_adapter_without_a_name_of_its_own_is_refused(adapters: tuple[str, ...], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        ServeConfig(adapters=adapters, served_model_name=("base",))


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31m", "\udcff", "a\x00"])
def test_a_model_s_name_that_breaks_lines_or_is_no_text_is_refused(name: str) -> None:
    for given in ({"served_model_name": ("a", name)}, {"model": name or "\n"}, {"adapters": (f"{name}=/a",)}):
        with pytest.raises(StartupError, match=r"a model's name is '.*' *: must have|--adapters is =/a"):
            ServeConfig(**given)
    ServeConfig(model=name or None, served_model_name=('a "quoted" \\ näme',))


def test_the_synthetic_engine_has_no_adapters() -> None:
    with pytest.raises(StartupError, match="--adapters is for --engine model"):
        ServeConfig(adapters=("a=1",), engine="synthetic")


def test_the_defaults_are_safe() -> None:
    config = ServeConfig()
    assert (config.host, config.max_num_queued_reqs, config.drain_timeout) == ("127.0.0.1", 2048, 30.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


def test_a_model_engine_is_told_the_directory_and_the_limits_that_were_given() -> None:
    plain = ServeConfig().engine_config(TOKENIZER)
    choices = {
        "dtype": "auto", "device": "auto", "quantization": "auto", "runner": "auto", "overlap": "auto",
        "deterministic": False, "runtime_adapters": False, "target_gap_s": 0.25, "min_prefill_share": 0.5,
    }  # fmt: skip
    assert plain == {"model": {"model": "/models/a", **choices}, "step_log": None, "log_format": "text"}
    assert ServeConfig(enable_dev_routes=True).engine_config(TOKENIZER)["model"]["runtime_adapters"] is True
    config = ServeConfig(
        dtype="float32",
        device="cpu",
        max_model_len=100,
        max_num_seqs=3,
        step_log="/tmp/log",
        log_format="json",
        num_threads=2,
        block_size=16,
    )
    assert config.engine_config(TOKENIZER) == {
        "model": {
            "model": "/models/a", **choices, "dtype": "float32", "device": "cpu", "max_model_len": 100,
            "max_num_seqs": 3, "num_threads": 2, "block_size": 16,
        },
        "step_log": "/tmp/log",
        "log_format": "json",
    }  # fmt: skip


def test_a_synthetic_engine_is_told_its_pace_in_seconds() -> None:
    config = ServeConfig(
        engine="synthetic", step_time_ms=20.0, prefill_time_ms=5.0, tokens_per_step=3, script="s", lockstep="l",
        fail_after=7, max_num_seqs=9,
    )  # fmt: skip
    told = config.engine_config(TOKENIZER)
    assert told == {
        "synthetic": {
            "tokenizer": str(TOKENIZER), "script": "s", "step_time_s": 0.02, "tokens_per_step": 3,
            "prefill_time_s": 0.005, "lockstep": "l", "fail_after": 7, "max_num_seqs": 9,
            "embedding_size": 64,
        },
        "step_log": None,
        "log_format": "text",
    }  # fmt: skip
    assert SyntheticConfig(**told["synthetic"]).fail_after == 7
    SyntheticConfig(**ServeConfig(engine="synthetic").engine_config(TOKENIZER)["synthetic"])
