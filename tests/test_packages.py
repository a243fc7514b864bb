"""What the packages may and may not import."""

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringserve.server.generation.engine_process import EngineProcess
from ringserve.server.settings.config import ServeConfig
from ringserve.shm_transport.config import RingConfig

PACKAGES = ["ringserve.shm_transport", "ringserve.engine", "ringserve.server"]
MAY_NOT_IMPORT = {
    "ringserve.shm_transport": {"ringserve.engine", "ringserve.server"},
    "ringserve.engine": {"ringserve.server"},
    "ringserve.server": {"ringserve.engine"},
}
REFUSED = ("pickle", "multiprocessing.shared_memory", "starlette.middleware.base.BaseHTTPMiddleware")


def files_of(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return sorted(Path(spec.origin).parent.rglob("*.py"))


def modules_of(package: str) -> list[str]:
    """Return the dotted names of a package's modules, those of its subpackages too."""
    files = [file for file in files_of(package) if file.stem != "__init__"]
    root = next(file.parent for file in files_of(package) if file.stem == "__init__")
    return [".".join((package, *file.relative_to(root).with_suffix("").parts)) for file in files]


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of everything that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import is relative"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    files = files_of(package)
    assert len(files) > 5
    for file in files:
        imported = {".".join(name.split(".")[:2]) for name in imports_of(ast.parse(file.read_text()))}
        assert not imported & MAY_NOT_IMPORT[package], file


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_refused_by_name_is_nowhere(package: str) -> None:
    for file in files_of(package):
        tree = ast.parse(file.read_text())
        for name in imports_of(tree):
            assert not any(f"{name}.".startswith(f"{refused}.") for refused in REFUSED), f"{file} imports {name}"
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not attributes & {"BaseHTTPMiddleware", "shared_memory", "pickle"}, file


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_server_imports_neither_torch_nor_transformers() -> None:
    modules = modules_of("ringserve.server")
    assert {"ringserve.server.launcher", "ringserve.server.load.command"} <= set(modules)
    loaded = run_python(f"import sys, {', '.join(modules)}\nprint(*sys.modules)").split()
    assert set(modules) <= set(loaded)
    assert not set(loaded) & {"torch", "transformers", "ringserve.engine", "huggingface_hub"}


def test_the_rings_need_nothing_of_a_server_or_a_model() -> None:
    modules = modules_of("ringserve.shm_transport")
    loaded = set(run_python(f"import sys, {', '.join(modules)}\nprint(*sys.modules)").split())
    assert not loaded & {"torch", "transformers", "starlette", "uvicorn", "tokenizers"}
    assert not loaded & {"ringserve.engine", "ringserve.server"}


def test_a_synthetic_engine_process_does_not_load_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text("[1, 2, 3]")
    config = ServeConfig(engine="synthetic", script=str(script)).engine_config(script)
    engine = EngineProcess(config, RingConfig(), step_timeout_s=60)
    try:
        maps = Path(f"/proc/{engine.process.pid}/maps").read_text()
    finally:
        engine.stop()
    assert "posix_ipc" in maps  # it is the engine, and its extensions are seen
    assert "torch" not in maps
    assert f"{os.sep}tokenizers{os.sep}" not in maps
