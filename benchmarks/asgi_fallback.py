"""The server's own command line under uvicorn's own protocol, which offers no way to the transport: the ASGI fallback.

python -m benchmarks.asgi_fallback serve [FLAGS]
"""

import sys

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ringserve.server import cli, launcher

if __name__ == "__main__":
    launcher.RingserveProtocol = lambda *arguments, turns: HttpToolsProtocol(*arguments)  # noqa: ARG005
    sys.exit(cli.main())
