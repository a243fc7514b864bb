"""One step of the engine: run it, say what came of it, let the engine settle. Used by the loop's thread."""

from collections.abc import Callable

from ringserve.engine.interface import Engine
from ringserve.engine.loop.link import EngineLink
from ringserve.engine.loop.step_log import StepLog
from ringserve.shm_transport.step import Step


class Stepper:
    """Makes an engine's steps, each with its record."""

    def __init__(self, engine: Engine, link: EngineLink, step_log: StepLog | None) -> None:
        self._engine, self._link, self._step_log = engine, link, step_log

    def run(self) -> None:
        """Make one step."""
        self._run(self._engine.step)

    def finish(self) -> None:
        """Finish a step that is in flight, if there is one."""
        self._run(self._engine.finish)

    def _run(self, make: Callable[[], Step | None]) -> None:
        engine, link = self._engine, self._link
        link.heartbeat.open_step()
        step = make()
        for data in engine.take_data():  # before the step: a request's last row is the last thing that is said of it
            link.send_data(data)
        published_ns = link.publish(step) if step is not None else 0
        for failure in engine.take_failures():
            link.send_failure(failure)
        engine.after_step()
        if step is not None and self._step_log is not None:
            self._step_log.write(published_ns, step)
        link.heartbeat.close_step()
