"""The interface between the HTTP side and whatever generates: the server knows an engine only as this."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable

from server.input_processor import EncodeRequest, GenerateRequest
from server.outputs import EmbeddingOutput, RequestOutput


class EngineClient(ABC):
    """What the server asks of an engine."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether requests can be served."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether it has been shut down, or has failed."""

    @property
    @abstractmethod
    def errored(self) -> bool:
        """Whether it has failed for good."""

    @property
    @abstractmethod
    def dead_error(self) -> Exception:
        """The error that every request gets once `is_stopped`."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs by its OutputKind; closing or cancelling the generator aborts the request.

        Raises:
            RequestError: If the request is not valid for the model.
            EngineGenerateError: If the engine failed this request; others go on.
            EngineDeadError: If the engine is gone.
        """

    @abstractmethod
    def encode(self, request: EncodeRequest) -> AsyncGenerator[EmbeddingOutput, None]:
        """Yield a prompt's embedding, once; closing or cancelling the generator aborts the request.

        Raises:
            RequestError, EngineGenerateError, EngineDeadError: As `generate`; RequestError too if the engine embeds
                nothing.
        """

    @abstractmethod
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request of these ids with finish reason abort; unknown ids are ignored. Never suspends."""

    @abstractmethod
    async def check_health(self) -> None:
        """Return if all is well; never waits for the engine.

        Raises:
            EngineDeadError: If the engine is gone, or stuck.
        """
