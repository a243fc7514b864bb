"""LoRA adapters as models of their own, through the real server: tiny random weights, the default model's tokenizer."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ringserve.server.settings.model_path import resolve
from ringserve.server.text.tokenizer import Tokenizer
from tests.e2e.conftest import RunningServer
from tests.engine.conftest import TinyModel
from tests.engine.weights.test_adapters import make_adapter, merged

PROMPT = list(range(1000, 1040))  # longer than a block, so that a prefix could be found
CONFIG = LlamaConfig(
    vocab_size=2000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.4, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


class Served(NamedTuple):
    """The server of a model and two adapters, and what transformers says of each with its adapter merged, by name."""

    server: RunningServer
    texts: dict[str, str]  # 24 tokens after PROMPT
    embeddings: dict[str, Any]  # [hidden_size], of PROMPT: its last token's final hidden state, of length 1


def embeddings_of(model: Any, deltas: dict[str, Any]) -> dict[str, Any]:
    """Return transformers' embedding of PROMPT with each adapter merged into the model, by name."""
    embeddings = {}
    for name, own in deltas.items():
        with torch.no_grad():
            states = merged(model, own)(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1]
        embeddings[name] = torch.nn.functional.normalize(states[0, -1], dim=0).numpy()
    return embeddings


def generated_texts(model: Any, deltas: dict[str, Any]) -> dict[str, str]:
    """Return what transformers says with each adapter merged into the model, 24 tokens greedily, by name."""
    tokenizer = Tokenizer.load(resolve(None) / "tokenizer.json")
    return {
        name: tokenizer.decode(TinyModel("", merged(model, own)).generate(PROMPT, 24)) for name, own in deltas.items()
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start the server of `base`, also called `alias`, and its adapters `one` and `two`."""
    root: Path = tmp_path_factory.mktemp("served")
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(CONFIG).eval()
    model.save_pretrained(root / "base")
    shutil.copy(resolve(None) / "tokenizer.json", root / "base")
    deltas = {
        "base": {},
        "one": make_adapter(root / "one", model, ("q_proj", "v_proj"), 1),
        "two": make_adapter(root / "two", model, ("down_proj",), 2),
    }
    texts, embeddings = generated_texts(model, deltas), embeddings_of(model, deltas)
    server = RunningServer(
        str(root / "base"), "--served-model-name", "base", "alias", "--dtype", "float32",
        "--adapters", f"one={root / 'one'}", f"two={root / 'two'}",
    )  # fmt: skip
    yield Served(server, texts, embeddings)
    assert server.stop() == 0


def test_a_request_gets_the_text_of_the_adapter_that_it_names_as_its_model(served: Served) -> None:
    server, texts, _ = served
    assert len(set(texts.values())) == 3

    def ask(name: str) -> tuple[str, str]:
        answer = server.complete(model=name, prompt=PROMPT, temperature=0, max_tokens=24, ignore_eos=True)
        return answer["model"], answer["choices"][0]["text"]

    names = ["one", "base", "two", "two", "one", "base"]
    with ThreadPoolExecutor(len(names)) as threads:
        together = list(threads.map(ask, names))
    assert together == [(name, texts[name]) for name in names]
    assert ask("alias") == ("base", texts["base"])


def test_a_stream_reports_its_adapter_as_the_model(served: Served) -> None:
    server, texts, _ = served
    body = {"model": "two", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    events = server.stream("/v1/completions", **body)
    assert {event["model"] for event in events[:-1]} == {"two"}
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == texts["two"]


def test_an_embedding_is_that_of_the_adapter_that_it_names_as_its_model(served: Served) -> None:
    server, _, embeddings = served
    for name, expected in [*embeddings.items(), ("alias", embeddings["base"])]:
        answer = server.post("/v1/embeddings", model=name, input=PROMPT).json()
        assert answer["model"] == ("base" if name == "alias" else name)
        np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-5, rtol=0)
    assert np.abs(embeddings["one"] - embeddings["base"]).max() > 0.01


def test_adapters_are_listed_with_the_model_that_they_adapt_as_their_parent(served: Served) -> None:
    server = served.server
    cards = server.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("base", None), ("alias", None), ("one", "base"), ("two", "base")
    ]  # fmt: skip
    assert server.client.get("/v1/models/two").json() == cards[3]


def test_a_model_that_is_no_adapter_either_is_a_404_that_names_those_that_are(served: Served) -> None:
    server = served.server
    response = server.post("/v1/completions", model="three", prompt="x")
    assert response.status_code == 404
    assert "base, alias, one, two" in response.json()["error"]["message"]


def test_an_adapter_that_cannot_be_read_ends_the_start_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"adapter 'sql': adapter_config\.json in /nowhere cannot be read"):
        RunningServer("--adapters", "sql=/nowhere")
