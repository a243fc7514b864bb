"""LoRA adapters that come and go while the real engine runs. On the loop's thread, but for `read`."""

import os.path

from ringserve.engine.errors import AdapterError
from ringserve.engine.interface import CallError
from ringserve.engine.runner.base import Runner
from ringserve.engine.schedule.scheduler import Scheduler
from ringserve.engine.weights.adapters import Adapter, load_adapter


class ModelAdapters:
    """An `engine.interface.AdapterStore` over the runner's adapters and the scheduler's requests."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._adapters, self._scheduler = runner.adapters, scheduler

    def read(self, name: str, path: str) -> Adapter:
        """Read a PEFT directory."""
        if not os.path.isdir(path):  # noqa: PTH112  # Path's raises for what is too long to be a name
            raise CallError(f"there is no adapter at {path}: name a PEFT directory", fault="not_found")
        try:
            return load_adapter(name, path)
        except AdapterError as exc:
            raise CallError(str(exc)) from exc

    def __contains__(self, name: object) -> bool:
        return name in self._adapters.numbers

    def add(self, adapter: Adapter) -> None:
        """Give the model's layers their parts."""
        if not self._adapters.is_open:
            raise CallError("this engine takes no adapters while it runs: start it with --enable-dev-routes")
        try:
            self._adapters.add(adapter)
        except AdapterError as exc:
            raise CallError(str(exc)) from exc

    def remove(self, name: str) -> None:
        """Forget a name."""
        del self._adapters.numbers[name]

    def try_free(self) -> bool:
        """Free what no live request has any more."""
        live = self._scheduler.live_adapters()
        nameless = self._adapters.nameless
        for number in nameless - live:
            self._adapters.free(number)
        return not nameless & live
