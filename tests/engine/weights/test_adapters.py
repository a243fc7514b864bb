import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from ringserve.engine.core.core import EngineCore
from ringserve.engine.errors import AdapterError
from ringserve.engine.interface import CallError, RequestFailedError
from ringserve.engine.weights.adapters import AdapterRows, load_adapter

TinyModels = Callable[[str], Any]
MakeDriver = Callable[..., Any]
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 3, 24
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": ALPHA,
    "bias": "none",
    "use_dora": False,
    "init_lora_weights": True,
}
PROMPTS = ([5, 9, 2, 40, 7, 7, 31], [3], list(range(20, 45)), [11, 12, 13, 14])


def make_adapter(path: Path, model: nn.Module, targets: tuple[str, ...], seed: int, **config: Any) -> dict[str, Any]:
    """Write a PEFT directory with random weights; return the deltas that it stands for, by layer."""
    generator = torch.Generator().manual_seed(seed)
    settings = {**CONFIG, "target_modules": list(targets), **config}
    scale = ALPHA / (RANK**0.5 if settings.get("use_rslora") else RANK)
    weights, deltas = {}, {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in targets:
            num_out, num_in = module.weight.shape[:: -1 if isinstance(module, Conv1D) else 1]
            a, b = (torch.randn(shape, generator=generator) * 0.3 for shape in ((RANK, num_in), (num_out, RANK)))
            weights |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            deltas[name] = scale * b @ a
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return deltas


def merged(model: nn.Module, deltas: dict[str, torch.Tensor]) -> Any:
    """Return the model with an adapter's deltas added to its weights."""
    result = copy.deepcopy(model)
    for name, delta in deltas.items():
        module = result.get_submodule(name)
        module.weight.data += delta.T if isinstance(module, Conv1D) else delta
    return result


@pytest.mark.parametrize(
    ("name", "runner", "first", "second"),
    [
        ("llama", "fused", ATTENTION + MLP, ("v_proj", "down_proj")),
        ("llama", "hf", ("q_proj", "v_proj"), MLP),
        ("qwen2", "fused", ("q_proj",), ATTENTION),
        ("qwen3", "fused", ("k_proj", "o_proj"), MLP),
        ("gpt2", "hf", ("c_attn", "c_proj"), ("c_fc",)),
        ("gemma2", "hf", ATTENTION, MLP),
        ("modernbert-decoder", "hf", ("q_proj", "Wo"), ("v_proj",)),
    ],
)
def test_two_adapters_and_none_in_one_batch_give_each_the_tokens_of_its_merged_model(
    name: str, runner: str, first: tuple[str, ...], second: tuple[str, ...], tmp_path: Path,
    tiny_model: TinyModels, make_driver: MakeDriver,
) -> None:  # fmt: skip
    tiny = tiny_model(name)
    deltas = {
        "": {},
        "one": make_adapter(tmp_path / "one", tiny.model, first, 1),
        "two": make_adapter(tmp_path / "two", tiny.model, second, 2, use_rslora=True),
    }
    adapters = {"one": str(tmp_path / "one"), "two": str(tmp_path / "two")}
    settings = {"runtime_adapters": True, "max_num_batched_tokens": 16, "block_size": 4}
    driver = make_driver(tiny.config(runner=runner, adapters=adapters, **settings))
    expected = {}
    for number, (adapter, own) in enumerate(deltas.items()):
        oracle = type(tiny)(tiny.path, merged(tiny.model, own))
        for index, prompt in enumerate(PROMPTS):
            handle = 10 * index + number
            expected[handle] = oracle.generate(prompt, 8)
            driver.add(handle, prompt, adapter=adapter, max_tokens=8)
    assert len({tuple(expected[20 + number]) for number in range(3)}) == 3
    driver.run()
    assert driver.tokens == expected
    assert driver.is_idle_and_empty()


def test_blocks_of_one_adapter_are_not_found_for_another(
    tmp_path: Path, tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model("llama")
    deltas = make_adapter(tmp_path / "one", tiny.model, ATTENTION, 1)
    driver = make_driver(tiny.config(adapters={"one": str(tmp_path / "one")}, block_size=4))
    prompt = list(range(20, 40))
    for handle, adapter in enumerate(("", "one", "", "one")):
        driver.add(handle, prompt, adapter=adapter, max_tokens=6)
        driver.run()
    plain, adapted = tiny.generate(prompt, 6), type(tiny)(tiny.path, merged(tiny.model, deltas)).generate(prompt, 6)
    assert [driver.tokens[handle] for handle in range(4)] == [plain, adapted, plain, adapted]
    assert driver.core.stats()["num_hit_tokens"] == 2 * 16


def test_a_directory_that_peft_wrote_gives_the_tokens_of_its_merged_model(
    tmp_path: Path, tiny_model: TinyModels, make_driver: MakeDriver, recwarn: pytest.WarningsRecorder
) -> None:
    peft = pytest.importorskip("peft")
    tiny = tiny_model("llama")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian")
    model = peft.get_peft_model(copy.deepcopy(tiny.model), config)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3, generator=generator)
    model.save_pretrained(tmp_path)
    driver = make_driver(tiny.config(adapters={"one": str(tmp_path)}))
    driver.add(1, PROMPTS[0], adapter="one", max_tokens=8)
    driver.run()
    oracle = type(tiny)(tiny.path, model.merge_and_unload())
    assert driver.tokens[1] == oracle.generate(PROMPTS[0], 8) != tiny.generate(PROMPTS[0], 8)


def test_an_unknown_adapter_is_refused_by_name(tmp_path: Path, tiny_model: TinyModels, make_driver: MakeDriver) -> None:
    tiny = tiny_model("llama")
    make_adapter(tmp_path / "one", tiny.model, ATTENTION, 1)
    driver = make_driver(tiny.config(adapters={"one": str(tmp_path / "one")}))
    with pytest.raises(RequestFailedError, match="no adapter 'other': known are one"):
        driver.add(1, [1, 2], adapter="other")


@pytest.mark.parametrize("runner", ["fused", "hf"])
def test_an_adapter_whose_name_is_taken_by_another_serves_those_who_have_it_and_is_freed_after_them(
    runner: str, tmp_path: Path, tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model("llama")
    paths = [tmp_path / "first", tmp_path / "second"]
    deltas = [make_adapter(path, tiny.model, ATTENTION, seed) for seed, path in enumerate(paths)]
    driver = make_driver(tiny.config(runner=runner, runtime_adapters=True, block_size=4))
    store, adapters = driver.core.adapters, driver.core._runner.adapters
    store.add(store.read("one", str(paths[0])))
    driver.add(1, PROMPTS[2], adapter="one", max_tokens=8)
    driver.step()
    store.remove("one")
    with pytest.raises(RequestFailedError, match="no adapter 'one': known are none"):
        driver.add(2, PROMPTS[2], adapter="one")
    store.add(store.read("one", str(paths[1])))
    driver.add(3, PROMPTS[2], adapter="one", max_tokens=12)
    assert not store.try_free()
    assert adapters._adapters.keys() == {1, 2}
    while 1 not in driver.finishes:
        driver.step()
    assert store.try_free()
    assert adapters._adapters.keys() == {2}
    assert {number for site in adapters._sites for number in site.parts} == {2}
    driver.run()
    for handle, length, own in ((1, 8, deltas[0]), (3, 12, deltas[1])):
        assert driver.tokens[handle] == type(tiny)(tiny.path, merged(tiny.model, own)).generate(PROMPTS[2], length)


def test_an_engine_that_was_not_started_for_it_takes_no_further_adapters(
    tmp_path: Path, tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model("llama")
    make_adapter(tmp_path / "one", tiny.model, ATTENTION, 1)
    store = make_driver(tiny.config()).core.adapters
    with pytest.raises(CallError, match="start it with --enable-dev-routes"):
        store.add(store.read("one", str(tmp_path / "one")))
    with pytest.raises(CallError, match="there is no adapter at"):
        store.read("two", str(tmp_path / "two"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"kasa_config": {"x": 1}}, "kasa_config"),
        ({"r": 0}, "no r and lora_alpha above 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path, tiny_model: TinyModels
) -> None:
    make_adapter(tmp_path / "one", tiny_model("llama").model, ATTENTION, 1, **config)
    with pytest.raises(AdapterError, match=f"adapter 'one'.*{message}"):
        load_adapter("one", str(tmp_path / "one"))


@pytest.mark.parametrize(
    ("name", "runner", "target"),
    [("llama", "fused", "lm_head"), ("llama", "hf", "lm_head"), ("modernbert-decoder", "hf", "dense")],
)
def test_targets_that_are_no_linear_layers_of_a_block_are_refused_by_name(
    name: str, runner: str, target: str, tmp_path: Path, tiny_model: TinyModels
) -> None:
    tiny = tiny_model(name)
    make_adapter(tmp_path / "one", tiny.model, ("q_proj", target), 1)
    with pytest.raises(AdapterError, match=f"{target} are no linear layers"):
        EngineCore(tiny.config(runner=runner, adapters={"one": str(tmp_path / "one")}))


def test_a_weight_of_another_kind_is_refused_by_name(tmp_path: Path, tiny_model: TinyModels) -> None:
    make_adapter(tmp_path / "one", tiny_model("llama").model, ATTENTION, 1)
    file = tmp_path / "one" / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 4)}, file)
    with pytest.raises(AdapterError, match="lora_embedding_A"):
        load_adapter("one", str(tmp_path / "one"))


def test_an_adapter_of_another_model_is_refused_with_both_shapes(tmp_path: Path, tiny_model: TinyModels) -> None:
    tiny = tiny_model("llama")
    make_adapter(tmp_path / "one", tiny.model, ATTENTION, 1)
    file = tmp_path / "one" / "adapter_model.safetensors"
    weights = load_file(file)
    key = next(key for key in weights if "q_proj.lora_B" in key)
    save_file(weights | {key: torch.zeros(7, RANK)}, file)
    with pytest.raises(AdapterError, match=r"of another model: its model.layers.0.self_attn.q_proj is \[7, "):
        EngineCore(tiny.config(adapters={"one": str(tmp_path / "one")}))


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_missing_or_damaged_file_is_an_error_that_names_it(
    file: str, is_damaged: bool, tmp_path: Path, tiny_model: TinyModels
) -> None:
    make_adapter(tmp_path / "one", tiny_model("llama").model, ATTENTION, 1)
    (tmp_path / "one" / file).unlink()
    if is_damaged:
        (tmp_path / "one" / file).write_bytes(b"{")
    with pytest.raises(AdapterError, match=f"adapter 'one': {file} in .* cannot be read"):
        load_adapter("one", str(tmp_path / "one"))


def test_rows_are_grouped_by_adapter() -> None:
    rows = AdapterRows(torch.device("cpu"))
    rows.set(torch.tensor([0, 2, 1, 2]).numpy())
    assert [(number, found.tolist()) for number, found in rows.groups if found is not None] == [(1, [2]), (2, [1, 3])]
    rows.set(torch.tensor([1, 1]).numpy())
    assert rows.groups == [(1, None)]
    rows.set(None)
    assert rows.groups == []


def test_tokens_of_a_deterministic_engine_do_not_depend_on_whether_a_batch_mate_has_an_adapter(
    tiny_model: TinyModels, make_driver: MakeDriver, tmp_path: Path
) -> None:
    tiny = tiny_model("llama")
    make_adapter(tmp_path / "a", tiny.model, ATTENTION + MLP, seed=1)
    settings = {"dtype": "bfloat16", "deterministic": True, "adapters": {"a": str(tmp_path / "a")}, "max_num_seqs": 2}
    tokens = []
    for mate in ("", "a"):
        driver = make_driver(tiny.config(**settings))
        for handle in range(0, 12, 2):
            driver.add(handle, [7, handle], max_tokens=40, temperature=2.0, seed=handle)
            driver.add(handle + 1, [9], max_tokens=40, adapter=mate)
        driver.run()
        tokens.append([driver.tokens[handle] for handle in range(0, 12, 2)])
    assert tokens[0] == tokens[1]
