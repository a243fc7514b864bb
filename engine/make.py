"""The engine that a configuration means: one step at a time, or two in flight."""

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.overlap import OverlappingCore
from engine.runner import make_runner
from engine.torch_device import TorchDevice


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
