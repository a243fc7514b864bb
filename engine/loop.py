"""The engine's step loop: inbox, one step, one record. The same for the real and the synthetic engine."""

import json
import logging

from engine.interface import Engine, RequestFailedError
from engine.link import EngineLink, InMessage
from engine.step_log import StepLog
from shm_transport.messages import AddRequest
from shm_transport.request_ring import Abort

logger = logging.getLogger(__name__)


def run(engine: Engine, link: EngineLink, step_log: StepLog | None = None) -> None:
    """Serve requests until the server says `shutdown`.

    Raises:
        PeerDiedError: If the server is gone.
    """
    while True:
        messages = link.drain() if engine.has_work else link.wait()
        if any(_apply(message, engine, link) for message in messages):
            return
        if engine.has_work:
            _step(engine, link, step_log)
        elif any(isinstance(message, Abort) for message in messages):
            link.publish(engine.idle_step())


def _apply(message: InMessage, engine: Engine, link: EngineLink) -> bool:
    """Hand one message to the engine; return whether it was the order to shut down."""
    if isinstance(message, AddRequest):
        try:
            engine.add(message)
        except RequestFailedError as failure:
            link.send_failure(failure)
    elif isinstance(message, Abort):
        engine.abort(message.handles)
    else:
        method = json.loads(message.body).get("method")
        if method == "shutdown":
            link.send_reply(message.call_id, {"result": True})
            return True
        link.send_reply(message.call_id, {"error": f"unknown method {method!r}: the engine knows 'shutdown'"})
    return False


def _step(engine: Engine, link: EngineLink, step_log: StepLog | None) -> None:
    link.heartbeat.open_step()
    step = engine.step()
    if step is not None:
        published_ns = link.publish(step)
        if step_log is not None:
            step_log.write(published_ns, step)
    for failure in engine.take_failures():
        link.send_failure(failure)
    link.heartbeat.close_step()
