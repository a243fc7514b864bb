"""The rooms of server/ and engine/ have an order: a module imports from its own room and from those below, never up."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the lowest: rooms of one level know nothing of each other. A room is a folder or a file.
LEVELS = {
    "server": [
        ["errors", "workers", "held_signals", "key_number"],
        ["telemetry", "text", "load"],
        ["grammar"],
        ["chat"],
        ["settings"],
        ["generation", "http"],
        ["api/render"],
        ["api"],
        ["api/responses"],
        ["rehearsal", "kept_memory"],
        ["app", "llm"],
        ["launcher"],
        ["cli"],
    ],
    "engine": [
        ["errors", "interface"],
        ["config"],
        ["memory", "transfer"],
        ["schedule", "weights", "loop", "synthetic"],
        ["sampling", "attention"],
        ["runner"],
        ["core"],
        ["__main__"],
    ],
}


def room_of(package: str, module: str) -> str:
    """Return the innermost room that a path without suffix lies in, such as api/render of api/render/sse."""
    rooms = [room for level in LEVELS[package] for room in level]
    return max((room for room in rooms if f"{module}/".startswith(f"{room}/")), key=len)


def imports_of(package: str, source: str) -> Iterator[str]:
    """Yield the paths of what a module imports of its own package, with the names: a/b of `from a import b`."""
    prefix = f"ringserve.{package}."
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix(prefix).replace(".", "/") for name in names if name.startswith(prefix))


def wrong_imports(package: str, module: str, source: str) -> list[str]:
    """Return what a module imports from its own level or from above, its own room apart."""
    level_of = {room: number for number, level in enumerate(LEVELS[package]) for room in level}
    own = room_of(package, module)
    imported = {name: room_of(package, name) for name in imports_of(package, source)}
    return [name for name, room in imported.items() if room != own and level_of[room] >= level_of[own]]


@pytest.mark.parametrize("package", LEVELS)
def test_imports_point_down(package: str) -> None:
    files = [file for file in (ROOT / package).rglob("*.py") if file != ROOT / package / "__init__.py"]
    assert len(files) > 50
    for file in files:
        module = file.relative_to(ROOT / package).with_suffix("").as_posix().removesuffix("/__init__")
        assert wrong_imports(package, module, file.read_text()) == [], file


@pytest.mark.parametrize(
    ("package", "module", "line"),
    [
        ("server", "text/tokenizer", "from ringserve.server.chat.template import ChatTemplate"),
        ("server", "http/sink", "from ringserve.server.generation.collector import DeltaWriter"),
        ("server", "generation/collector", "from ringserve.server.http import sink"),
        ("server", "api/render/sse", "import ringserve.server.api.serving"),
        ("engine", "schedule/request", "    from ringserve.engine.sampling.grammar import GrammarMatcher"),
        ("engine", "weights/checkpoint", "from ringserve.engine.schedule import batch"),
    ],
)
def test_an_import_that_points_up_or_aside_is_found(package: str, module: str, line: str) -> None:
    source = (ROOT / package / f"{module}.py").read_text()
    assert wrong_imports(package, module, source) == []
    assert len(wrong_imports(package, module, f"{source}\nif True:\n    {line.strip()}\n")) == 1


def test_every_room_is_there_and_has_a_place() -> None:
    for package, levels in LEVELS.items():
        rooms = {room for level in levels for room in level}
        assert {room for room in rooms if not list((ROOT / package).glob(f"{room}*"))} == set()
        top = {
            path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
        }
        assert top - {"__init__"} == {room.partition("/")[0] for room in rooms}


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_file_that_a_document_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text().replace("\\_", "_")
    named = set(re.findall(r"[\w/]+\.(?:py|c)\b", text))
    assert len(named) > 50
    folders = [ROOT, *(ROOT / top for top in ("server", "engine", "shm_transport"))]
    bare = {path.name for top in folders[1:] for path in top.rglob("*.py")}
    assert {
        name for name in named if name not in bare and not any((folder / name).exists() for folder in folders)
    } == set()
