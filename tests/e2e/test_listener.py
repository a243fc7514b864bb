"""TLS, Unix sockets and a path prefix, each with a stream that takes the short way to its transport."""

import asyncio
import contextlib
import itertools
import json
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
import uvloop

from ringserve.server.errors import StartupError
from ringserve.server.http.listener import accept, bound, listen, tls_context
from ringserve.server.settings.config import ServeConfig
from tests.e2e.conftest import CLI, wait_until

SYNTHETIC = ("--engine", "synthetic", "--max-model-len", "2048")
BODY = {"prompt": "a", "max_tokens": 200, "stream": True, "temperature": 0}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("tls")
    cert, key = str(directory / "cert.pem"), str(directory / "key.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command = ["openssl", "req", "-x509", *curve, "-keyout", key, "-out", cert, *names]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.fixture
def plain_events(synthetic):
    return synthetic.stream("/v1/completions", **BODY)


def texts(events: list) -> str:
    assert events[-1] == "[DONE]"
    return "".join(event["choices"][0]["text"] for event in events[:-1])


def read_stream(client: httpx.Client) -> list:
    with client.stream("POST", "/v1/completions", json=BODY) as response:
        events = response.read().decode().rstrip("\n").split("\n\n")
        assert response.status_code == 200
    return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


class Started:
    """A server whose banner has no plain URL."""

    def __init__(self, *arguments: str) -> None:
        command = [*CLI, "serve", "--port", "0", *SYNTHETIC, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.banner = self.process.stdout.readline()

    @property
    def port(self) -> int:
        return int(self.banner.split("/v1")[0].rsplit(":", 1)[-1])

    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        assert self.process.returncode == 0


def test_a_stream_over_tls_is_the_same_stream(certificate, plain_events, tmp_path) -> None:
    cert, key = certificate
    with Started("--ssl-certfile", cert, "--ssl-keyfile", key) as server:
        url = server.banner.split(" at ")[1].split("/v1")[0]
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=cert)) as client:
            assert texts(read_stream(client)) == texts(plain_events)
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json={**BODY, "stream": False}).status_code == 200
        with pytest.raises(httpx.ConnectError), httpx.Client(base_url=url) as client:
            client.get("/health")  # nobody vouches for the certificate
        with socket.create_connection(("127.0.0.1", server.port)) as raw:  # no TLS at all
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" not in raw.recv(1000)


def test_a_client_without_a_certificate_is_refused_where_one_is_required(certificate) -> None:
    cert, key = certificate
    options = ("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", cert, "--ssl-cert-reqs", "required")
    with Started(*options) as server:
        url = server.banner.split(" at ")[1].split("/v1")[0]
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.TransportError), httpx.Client(base_url=url, verify=context) as client:
            client.get("/health")
        context = ssl.create_default_context(cafile=cert)
        context.load_cert_chain(cert, key)
        with httpx.Client(base_url=url, verify=context) as client:
            assert client.get("/health").status_code == 200


def client_hello() -> bytes:
    """Return the first bytes of a TLS handshake."""
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="a").do_handshake()
    return outgoing.read()


def is_cut(client: socket.socket) -> bool:
    """Whether the server has closed a connection; what it says first is read."""
    try:
        while client.recv(10_000):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_a_tls_client_that_does_not_go_on_is_cut_off_while_others_are_served(certificate) -> None:
    cert, key = certificate
    context = ssl.create_default_context(cafile=cert)
    with Started("--ssl-certfile", cert, "--ssl-keyfile", key, "--receive-timeout", "1") as server:
        before = server.num_descriptors()
        started = time.monotonic()
        silent, trickling, shaken = clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        shaken = clients[2] = context.wrap_socket(shaken, server_hostname="localhost")  # which then asks nothing
        hello = iter(client_hello())
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context) as other:
            wait_until(lambda: server.num_descriptors() >= before + 3, 5)
            for client in clients:
                client.setblocking(False)
            while not (is_cut(silent) and is_cut(trickling)):
                assert time.monotonic() - started < 5 * 1.0
                with contextlib.suppress(OSError):  # it is cut off
                    trickling.send(bytes([next(hello)]))
                assert other.get("/health").status_code == 200
                time.sleep(0.05)
            print(f"silent and trickling clients are cut off after {time.monotonic() - started:.1f} s")
        wait_until(lambda: server.num_descriptors() <= before, 5 * 3.0)
        print(f"every descriptor is back after {time.monotonic() - started:.1f} s")
        for client in clients:
            client.close()


def test_tls_clients_that_neither_ask_nor_leave_do_not_hold_up_the_end(certificate) -> None:
    cert, key = certificate
    context = ssl.create_default_context(cafile=cert)
    with Started("--ssl-certfile", cert, "--ssl-keyfile", key, "--drain-timeout", "50") as server:
        address = ("127.0.0.1", server.port)
        with (
            socket.create_connection(address),
            context.wrap_socket(socket.create_connection(address), server_hostname="localhost") as idle,
        ):
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in idle.recv(1000)
            started = time.monotonic()
            server.process.terminate()
            assert server.process.wait(30) == 0
            print(f"ended after {time.monotonic() - started:.1f} s")
            assert time.monotonic() - started < 5 * 2.0


@pytest.mark.parametrize(
    "options",
    [{"ssl_keyfile": "/k"}, {"ssl_ca_certs": "/c"}, {"ssl_cert_reqs": "required"}, {"ssl_certfile": "/no/such"},
     {"ssl_certfile": __file__}, {"ssl_certfile": __file__, "ssl_cert_reqs": "required"}],
)  # fmt: skip
def test_tls_options_that_do_not_fit_are_known_before_the_model_loads(options: dict[str, str]) -> None:
    with pytest.raises(StartupError, match=r"--ssl-|for TLS"):
        tls_context(ServeConfig(**options))


def test_a_unix_socket_serves_streams_and_is_removed_at_the_end(plain_events, tmp_path) -> None:
    path = tmp_path / "s.sock"
    with Started("--uds", str(path), "--sse-keep-alive-interval", "5") as server:
        assert str(path) in server.banner
        assert path.stat().st_mode & 0o777 == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert texts(read_stream(client)) == texts(plain_events)
            assert client.get("/health").status_code == 200
        with pytest.raises(StartupError, match="in use"), bound(ServeConfig(uds=str(path))):
            pass
    assert not path.exists()


@pytest.mark.parametrize(
    ("redirections", "said"), [(">/dev/full", "cannot write to standard output"), (">&- 2>&-", "")]
)
def test_a_server_that_cannot_write_where_it_says_that_it_is_ready_serves(
    redirections: str, said: str, tmp_path
) -> None:
    path = tmp_path / "s.sock"
    command = ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *CLI, "serve", *SYNTHETIC, "--uds", str(path)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def is_healthy() -> bool:
        with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return client.recv(100).startswith(b"HTTP/1.1 200 ")
        return False

    wait_until(lambda: server.poll() is not None or is_healthy(), 30)
    server.terminate()
    _, stderr = server.communicate(timeout=30)
    assert server.returncode == 0, stderr
    assert said in stderr


def test_a_socket_that_a_killed_server_left_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    stale, file = tmp_path / "stale", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    with bound(ServeConfig(uds=str(stale))):
        assert stale.is_socket()
    assert not stale.exists()
    file.write_text("mine")
    with pytest.raises(StartupError, match="cannot bind"), bound(ServeConfig(uds=str(file))):
        pass
    assert file.read_text() == "mine"


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # interrupted before its `with` begins
def test_a_signal_at_any_moment_of_binding_leaves_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"

    def is_bound_within(num_lines: int) -> bool:
        moments = iter(range(num_lines))

        def interrupt(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
            if not frame.f_code.co_filename.endswith("server/http/listener.py"):
                return None
            if event == "line" and next(moments, None) is None:
                raise KeyboardInterrupt  # as a signal's handler does, which ends the tracing too
            return interrupt

        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
            stack.callback(sys.settrace, sys.gettrace())
            sys.settrace(interrupt)
            with bound(ServeConfig(uds=str(path))):
                sys.settrace(None)
                return True
        return False

    num_lines = next(num_lines for num_lines in itertools.count() if is_bound_within(num_lines) or path.exists())
    assert not path.exists()
    assert num_lines > 10


def test_a_path_prefix_is_the_proxys_and_keys_know_it(plain_events) -> None:
    with Started("--root-path", "/llm/a", "--api-key", "k") as server:
        url = server.banner.split(" at ")[1].split("/llm/a/v1")[0]
        with httpx.Client(base_url=url, headers={"authorization": "Bearer k"}) as client:
            assert texts(read_stream(client)) == texts(plain_events)  # as the proxy asks, prefix stripped
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401


@pytest.mark.parametrize("prefix", ["a", "/a/", "/", "/a b"])
def test_a_prefix_that_is_none_is_refused(prefix: str) -> None:
    with pytest.raises(StartupError, match="--root-path"):
        ServeConfig(root_path=prefix)


@pytest.mark.parametrize("host", ["a" * 300, "no.such.host.invalid", "\u00e4" * 70])
def test_a_name_that_is_no_hosts_is_refused(host: str) -> None:
    with pytest.raises(StartupError, match="cannot bind"), bound(ServeConfig(host=host, port=0)):
        pass


def test_a_port_that_a_loading_server_has_is_refused_and_one_just_left_is_not() -> None:
    with bound(ServeConfig(port=0)) as listener:
        config = ServeConfig(port=listener.getsockname()[1])
        with pytest.raises(StartupError, match="cannot bind"), bound(config):
            pass
        listen(listener, config)
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()  # first, so that its end is the one that lingers
    with bound(config) as listener:
        listen(listener, config)


def test_who_cannot_listen_says_so() -> None:
    with bound(ServeConfig(port=0)) as listener, socket.socket() as other:
        for each in (listener, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(listener.getsockname())
        other.listen()
        with pytest.raises(StartupError, match="cannot listen"):
            listen(listener, ServeConfig(port=listener.getsockname()[1]))


def test_a_unix_socket_of_a_loading_server_is_its_own_and_another_servers_is_left_alone(tmp_path) -> None:
    file = tmp_path / "socket"
    config = ServeConfig(uds=str(file))
    with bound(config):
        with pytest.raises(StartupError, match="cannot bind"), bound(config):
            pass
        assert file.is_socket()
        file.unlink()
        with bound(config):
            assert file.is_socket()
    assert not file.exists()
    with bound(config):
        file.unlink()
        file.write_text("another's")
    assert file.read_text() == "another's"


def test_a_turn_of_the_loop_accepts_many_connections() -> None:
    num_clients, accepted = 64, list[asyncio.BaseTransport]()

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.append(transport)

    async def count_turns(listener: socket.socket) -> int:
        servers = await accept(listener, Accepting)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(num_clients)]
        num_turns = 0
        while len(accepted) < num_clients:
            await asyncio.sleep(0)
            num_turns += 1
        for each in (*accepted, *clients, *servers):
            each.close()
        return num_turns

    config = ServeConfig(port=0)
    with bound(config) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        listen(listener, config)
        assert runner.run(count_turns(listener)) < num_clients / 4


def test_a_server_takes_more_connections_than_a_shells_usual_limit_of_files(start_server) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 2048:
        pytest.skip(f"no process may have more than {most} files open here")
    clients: list[socket.socket] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
        server = start_server(*SYNTHETIC)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        clients += [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1100)]
        for each in clients:
            each.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert all(each.recv(100).startswith(b"HTTP/1.1 200 ") for each in clients)
    finally:
        for each in clients:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    assert server.stop() == 0
