"""The engine's step loop: inbox, one step, one record. The same for the real and the synthetic engine."""

import gc
import json
import logging

from engine.interface import Engine, RequestFailedError
from engine.link import EngineLink, InMessage
from engine.step_log import StepLog
from shm_transport.messages import AddRequest
from shm_transport.request_ring import Abort

logger = logging.getLogger(__name__)


_COLLECT_EVERY = 4096  # steps, for an engine that is never idle


def run(engine: Engine, link: EngineLink, step_log: StepLog | None = None) -> None:
    """Say that requests may come, then serve them until the server says `shutdown`.

    Garbage is collected when nobody waits for a step: a collection among the objects of a loaded model takes as long
    as several steps.

    Raises:
        PeerDiedError: If the server is gone.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        link.send_ready(engine.limits())
        _serve(engine, link, step_log)
    finally:
        gc.enable()
        gc.unfreeze()


def _serve(engine: Engine, link: EngineLink, step_log: StepLog | None) -> None:
    num_steps = 0  # since the last collection
    while True:
        is_idle = not engine.has_work
        messages = link.wait() if is_idle else link.drain()
        if any(_apply(message, engine, link) for message in messages):
            return
        if engine.has_work:
            _step(engine, link, step_log)
            num_steps += 1
        elif any(isinstance(message, Abort) for message in messages):
            link.publish(engine.idle_step())
        if num_steps >= _COLLECT_EVERY or (num_steps and is_idle and not messages):
            gc.collect()
            num_steps = 0


def _apply(message: InMessage, engine: Engine, link: EngineLink) -> bool:
    """Hand one message to the engine; return whether it was the order to shut down."""
    if isinstance(message, AddRequest):
        try:
            engine.add(message)
        except RequestFailedError as failure:
            link.send_failure(failure)
    elif isinstance(message, Abort):
        engine.abort(message.handles)
        link.note_aborted(len(message.handles))
    else:
        method = json.loads(message.body).get("method")
        if method == "shutdown":
            link.send_reply(message.call_id, {"result": True})
            return True
        if method == "stats":
            link.send_reply(message.call_id, {"result": engine.stats()})
        else:
            error = f"unknown method {method!r}: the engine knows 'shutdown' and 'stats'"
            link.send_reply(message.call_id, {"error": error})
    return False


def _step(engine: Engine, link: EngineLink, step_log: StepLog | None) -> None:
    link.heartbeat.open_step()
    step = engine.step()
    for data in engine.take_data():  # before the step: a request's last row is the last thing that is said of it
        link.send_data(data)
    published_ns = link.publish(step) if step is not None else 0
    for failure in engine.take_failures():
        link.send_failure(failure)
    engine.after_step()
    if step is not None and step_log is not None:
        step_log.write(published_ns, step)
    link.heartbeat.close_step()
