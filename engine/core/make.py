"""The engine that a configuration means: one step at a time, or two in flight."""

from ringserve.engine.config import EngineConfig
from ringserve.engine.core.core import EngineCore
from ringserve.engine.core.overlap import OverlappingCore
from ringserve.engine.core.torch_device import TorchDevice
from ringserve.engine.runner import make_runner


def make_engine(config: EngineConfig) -> EngineCore | OverlappingCore:
    """Load the model and return its engine.

    Raises:
        EngineError: If the model cannot be loaded or does not fit.
    """
    runner = make_runner(config)
    core = EngineCore(config, runner=runner)
    if not config.resolve_overlap(runner.device.type):
        return core
    return OverlappingCore(core, TorchDevice(runner), runner.block_size)
