"""Reading keys, and the layer alone; over sockets: tests/e2e/test_api_keys.py."""

import asyncio
from pathlib import Path

import pytest
from starlette.types import Message

from ringserve.server.errors import StartupError
from ringserve.server.http.api_keys import ApiKeys, guarded, read_keys
from ringserve.server.key_number import current_key_number
from ringserve.server.settings.config import ServeConfig
from ringserve.server.workers import run_near


class App:
    """Counts the requests that get through; ends each as `fail` or `release` says."""

    def __init__(self) -> None:
        self.num_running = 0
        self.release = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, *_: object) -> None:
        self.num_running += 1
        try:
            await self.release.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.num_running -= 1


async def ask(app: ApiKeys, key: str, **scope: str) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    headers = [(b"authorization", f"Bearer {key}".encode())]
    whole = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, **scope}
    await app(whole, receive, send)
    return sent


def test_keys_of_options_and_file_are_one_list_without_duplicates(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# our keys\n\nsk-b\n  sk-c  \nsk-a\n")
    assert read_keys(ServeConfig(api_key=("sk-a",), api_key_file=str(file))) == ("sk-a", "sk-b", "sk-c")
    assert read_keys(ServeConfig()) == ()


def test_a_file_made_on_windows_holds_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfsk-a\r\n\r\n# more\r\nsk-b\r\n")
    assert read_keys(ServeConfig(api_key_file=str(file))) == ("sk-a", "sk-b")


@pytest.mark.parametrize("content", ["", "# none\n\n", "with space\n", "schlüssel\n"])
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(StartupError, match="key"):
        read_keys(ServeConfig(api_key_file=str(file)))


@pytest.mark.parametrize(
    "options", [{"api_key": ("",)}, {"api_key_file": "/no/such"}, {"max_concurrency_per_key": 1}, {"fair_by_key": True}]
)
def test_an_empty_key_a_missing_file_and_a_limit_without_keys_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(StartupError):
        read_keys(ServeConfig(**options))


def test_an_error_about_a_key_and_the_config_do_not_show_it() -> None:
    config = ServeConfig(api_key=("sécret",))
    assert "sécret" not in repr(config)
    with pytest.raises(StartupError) as raised:
        read_keys(config)
    assert "sécret" not in str(raised.value)


async def test_without_keys_there_is_no_layer() -> None:
    app = App()
    assert guarded(app, (), ServeConfig()) is app


@pytest.mark.parametrize(("is_fair", "numbers"), [(True, [1, 2, 1]), (False, [0, 0, 0])])
async def test_a_request_knows_its_keys_number_where_keys_share_fairly(is_fair: bool, numbers: list[int]) -> None:
    seen = []

    async def app(*_: object) -> None:
        seen.append(await run_near(False, current_key_number))

    guard = guarded(app, ("a", "b"), ServeConfig(fair_by_key=is_fair, api_key=("a", "b")))
    for key in ("a", "b", "a"):  # one task, as the requests of a pipeline
        await ask(guard, key)
    assert seen == numbers


@pytest.mark.parametrize("ending", ["done", "failed", "cancelled"])
async def test_a_keys_place_is_free_again_however_its_request_ends(ending: str) -> None:
    app = App()
    guard = ApiKeys(app, ["a", "b"], max_concurrency=1)
    running = asyncio.ensure_future(ask(guard, "a"))
    await asyncio.sleep(0)
    (start, _) = await ask(guard, "a")
    assert start["status"] == 429
    assert (b"retry-after", b"1") in start["headers"]
    other = asyncio.ensure_future(ask(guard, "b"))  # another key's place is its own
    await asyncio.sleep(0)
    assert app.num_running == 2
    if ending == "failed":
        app.error = RuntimeError("no")
    if ending == "cancelled":
        running.cancel()
    app.release.set()
    await asyncio.gather(running, other, return_exceptions=True)
    app.error = None
    assert await ask(guard, "a") == []


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
async def test_open_paths_are_compared_whole(path: str) -> None:
    app = App()
    app.release.set()
    guard = ApiKeys(app, ["a"])
    assert await ask(guard, "", path=path) == []
    assert await ask(guard, "", path=f"/api{path}", root_path="/api") == []
    for other in (f"{path}/", f"{path}x", f"/v1{path}", f"{path}/../v1/models", path.upper()):
        (start, _) = await ask(guard, "", path=other)
        assert start["status"] == 401
