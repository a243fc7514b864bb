"""The listening socket: a TCP port or a Unix socket, bound before anything is loaded; and the TLS context around it."""

import asyncio
import contextlib
import functools
import ipaddress
import math
import resource
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ringserve.server.errors import StartupError
from ringserve.server.settings.config import ServeConfig

_BACKLOG = 2048  # connections that wait to be accepted
_ACCEPTS = 24  # in a turn of the loop; each that has nothing to accept costs a new connection 2 us
_UDS_MODE = 0o660  # owner and group: a proxy in front is in the group
_CERT_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


@contextlib.contextmanager
def bound(config: ServeConfig) -> Iterator[socket.socket]:
    """Bind what the configuration names; close it at the end, and remove a Unix socket's file, if it is still ours.

    Nothing listens there until `listen`, and no other server can bind it meanwhile.

    Raises:
        StartupError: If it is in use or cannot be bound.
    """
    if config.uds is None:
        with _bind_port(config) as listener:
            yield listener
        return
    path, own = Path(config.uds), None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:  # around the bind too: a signal may end the server right after it
            _bind_path(listener, path)
            own = _file_of(path)
            yield listener
        finally:
            is_own = _file_of(path) == own if own else listener.getsockname() != ""  # bound, and then interrupted
            if is_own:
                path.unlink(missing_ok=True)


def listen(listener: socket.socket, config: ServeConfig) -> None:
    """Begin to listen. Called here because uvloop does not say that it cannot.

    Raises:
        StartupError: If another process has come first.
    """
    try:
        if config.uds is None:  # else the last server's closed connections are in the way for a minute
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(_BACKLOG)
    except OSError as exc:
        raise StartupError(f"cannot listen at {config.uds or f'{config.host}:{config.port}'}: {exc.strerror}") from exc


def allow_connections() -> None:
    """Let the process open as many files as the system allows: a connection is one, and 1,024 a usual first limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def accept(
    listener: socket.socket,
    make_protocol: Callable[[], asyncio.BaseProtocol],
    tls: ssl.SSLContext | None = None,
    receive_timeout_s: float = 0.0,
) -> list[asyncio.Server]:
    """Take up the connections that come, until all of the result are closed.

    libuv accepts one connection of each listener in a turn of the loop, so that thousands at once would come in as
    slowly as turns pass, and the kernel would have those that its queue has no room for try again a second later. So it
    listens several times with the one socket; not with TLS, where what follows in a turn, a handshake, takes longer.

    Args:
        listener: What `listen` was called for.
        make_protocol: Called for each connection, after its TLS handshake.
        tls: Of `tls_context`.
        receive_timeout_s: A client whose handshake takes longer is cut off; 0: never.
    """
    create_server = functools.partial(asyncio.get_running_loop().create_server, make_protocol, backlog=_BACKLOG)
    if tls is None:
        return [await create_server(sock=each) for each in (listener, *(listener.dup() for _ in range(_ACCEPTS - 1)))]
    acceptor = await create_server(
        sock=listener,
        ssl=tls,
        ssl_handshake_timeout=receive_timeout_s or math.inf,
        ssl_shutdown_timeout=math.inf,  # connection_sweep.py knows whether the client still reads
    )
    return [acceptor]


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Return the context of the certificate that the configuration names; None: no TLS.

    Raises:
        StartupError: If a file cannot be read or does not fit, or one is missing.
    """
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(config, name) not in (None, "none"):
                raise StartupError(f"--{name.replace('_', '-')} is given without --ssl-certfile")
        return None
    if config.ssl_cert_reqs != "none" and config.ssl_ca_certs is None:
        raise StartupError(f"--ssl-cert-reqs is {config.ssl_cert_reqs}: --ssl-ca-certs must say whose certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as exc:  # SSLError is one
        files = ", ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)))
        raise StartupError(f"cannot use {files} for TLS: {exc}") from exc
    context.verify_mode = _CERT_REQS[config.ssl_cert_reqs]
    return context


def url_of(listener: socket.socket, config: ServeConfig) -> str:
    """Return where clients find the server; for a Unix socket as any host: the path is told to the client apart."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is not None:
        return f"{scheme}://localhost{config.root_path}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether programs of this machine alone can connect to a port; a Unix socket is none, which browsers cannot."""
    if listener.family == socket.AF_UNIX:
        return False
    address = ipaddress.ip_address(listener.getsockname()[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _bind_port(config: ServeConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # two sockets that both have it may be bound to one port while neither listens
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            undo.pop_all()
    except (OSError, UnicodeError) as exc:  # UnicodeError: the name can be no host's
        reason = getattr(exc, "strerror", None) or exc
        raise StartupError(
            f"cannot bind {config.host}:{config.port}: {reason}; choose another --host or --port"
        ) from exc
    return listener


def _bind_path(listener: socket.socket, path: Path) -> None:
    """Bind a Unix socket; one that a killed server has left is replaced, a file of another kind never."""
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _is_served(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(_UDS_MODE)
    except OSError as exc:
        raise StartupError(f"cannot bind {path}: {exc.strerror or exc}; choose another --uds") from exc


def _file_of(path: Path) -> tuple[int, int] | None:
    """Return which file a path leads to."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_served(path: Path) -> bool:
    """Whether a process has the socket; one that still loads its model refuses connections like none at all."""
    with contextlib.suppress(OSError):  # without /proc, connecting alone tells
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
        if any(line.endswith(f" {path}") for line in lines):
            return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # its queue is full, or it is not ours
            return True
    return True
