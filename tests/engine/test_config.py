import dataclasses
import json

import pytest

from ringserve.engine.config import EngineConfig
from ringserve.engine.errors import EngineConfigError


def test_a_config_survives_json() -> None:
    config = EngineConfig(model="/models/some", max_model_len=512)
    assert EngineConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dtype": "int8"}, "dtype is 'int8': use one of auto, bfloat16, float16, float32"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: it must be at least 1"),
        ({"target_gap_s": 0.0}, "target_gap_s is 0.0: it must be above 0"),
        ({"target_gap_s": float("nan")}, "target_gap_s is nan"),
        ({"min_prefill_share": -0.1}, "min_prefill_share is -0.1: from 0 to 0.95"),
        ({"min_prefill_share": 1.0}, "min_prefill_share is 1.0"),
        ({"max_model_len": -5}, "max_model_len is -5"),
    ],
)
def test_a_value_outside_of_its_range_is_refused_by_name(settings: dict[str, object], match: str) -> None:
    with pytest.raises(EngineConfigError, match=match):
        EngineConfig(model="x", **settings)  # type: ignore[arg-type]


def test_threads_default_to_all_cores_but_one_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (8, 7)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _pid, cores=cores: set(range(cores)))
        assert EngineConfig(model="x").resolve_num_threads() == threads
    assert EngineConfig(model="x", num_threads=3).resolve_num_threads() == 3


def test_two_steps_are_in_flight_on_gpus_unless_told_otherwise() -> None:
    found = {
        overlap: [EngineConfig(model="x", overlap=overlap).resolve_overlap(device) for device in ("cpu", "cuda")]
        for overlap in ("auto", "on", "off")
    }
    assert found == {"auto": [False, True], "on": [True, True], "off": [False, False]}
