"""What the packages may and may not import."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from ringserve.server.generation.engine_process import EngineProcess
from ringserve.server.settings.config import ServeConfig
from ringserve.shm_transport.config import RingConfig
from tests.conftest import wrongly_named
from tests.e2e.conftest import LEASH

ROOT = Path(__file__).parents[1]
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


def test_a_file_that_is_imported_under_a_second_name_is_found() -> None:
    first, second = ModuleType("ringserve.server.errors"), ModuleType("server.errors")
    first.__file__, second.__file__ = str(ROOT / "ringserve/server/errors.py"), str(ROOT / "server/errors.py")
    assert wrongly_named({"ringserve.server.errors": first}) == []
    assert wrongly_named({"server.errors": second}) == ["server.errors"]
    assert wrongly_named({"again": first, "ringserve.server.errors": first}) == ["again", "ringserve.server.errors"]


def test_an_installed_wheel_serves_beside_files_of_the_users_with_our_names(tmp_path: Path) -> None:
    source, site, home = tmp_path / "source", tmp_path / "site", tmp_path / "home"
    for top in ("ringserve", "server", "engine", "shm_transport"):
        shutil.copytree(ROOT / top, source / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", *options, "--target", str(site), str(wheel)], check=True, timeout=120)
    assert {path.name for path in site.iterdir()} - {"bin"} == {"ringserve", f"{wheel.name.split('-py3')[0]}.dist-info"}
    for name in ("server.py", "ringserve.py", "engine/__init__.py", "shm_transport.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("raise SystemExit('a file of the user was imported')")
    server = subprocess.Popen(
        [*LEASH, str(site / "bin" / "ringserve"), "serve", "--engine", "synthetic", "--port", "0"],
        cwd=home, env=os.environ | {"PYTHONPATH": str(site)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    address = re.search(r"http://[\d.]+:\d+", server.stdout.readline())
    assert address is not None
    body = {"prompt": "a", "max_tokens": 4}
    assert httpx.post(f"{address[0]}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    (engine,) = [pid for pid in children if b"ringserve.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in (server.pid, engine):
        assert str(site) in Path(f"/proc/{pid}/environ").read_text()
    server.terminate()
    server.communicate(timeout=30)
    assert server.returncode == 0
    code = "import ringserve.engine, ringserve.server.llm as llm; print(llm.__file__)"
    where = subprocess.check_output([sys.executable, "-P", "-c", code], text=True, env={"PYTHONPATH": str(site)})
    assert Path(where).is_relative_to(site)


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
