"""The engine's step loop: inbox, one step, one record. The same for the real and the synthetic engine."""

import gc
from collections.abc import Callable

from ringserve.engine.interface import Engine
from ringserve.engine.loop.control import Control
from ringserve.engine.loop.link import EngineLink
from ringserve.engine.loop.step_log import StepLog
from ringserve.engine.loop.stepper import Stepper
from ringserve.shm_transport.messages import AddRequest
from ringserve.shm_transport.request_ring import Abort, InMessage
from ringserve.shm_transport.step import Step

_COLLECT_EVERY = 4096  # steps, for an engine that is never idle
_CHANGES = (Abort, (Abort, AddRequest))  # messages after which figures are told although no step follows; if paused


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
        stepper = Stepper(engine, link, step_log)
        _serve(link, Control(engine, link, stepper), stepper, engine.idle_step)
    finally:
        gc.enable()
        gc.unfreeze()


def _serve(link: EngineLink, control: Control, stepper: Stepper, idle_step: Callable[[], Step]) -> None:
    num_steps = 0  # since the last collection
    while True:
        is_idle = not control.has_step
        messages = link.wait(control.wait_s) if is_idle else link.drain()
        if any(_apply(message, control) for message in messages):
            return
        if control.has_step:
            stepper.run()
            num_steps += 1
        elif any(isinstance(message, _CHANGES[control.is_paused]) for message in messages):
            link.publish(idle_step())
        control.retry()
        if num_steps >= _COLLECT_EVERY or (num_steps and is_idle and not messages):
            gc.collect()
            num_steps = 0


def _apply(message: InMessage, control: Control) -> bool:
    """Carry out one message; return whether it was the order to shut down."""
    if isinstance(message, AddRequest):
        control.add(message)
    elif isinstance(message, Abort):
        control.abort(message.handles)
    else:
        return control.call(message)
    return False
