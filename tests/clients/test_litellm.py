"""litellm as an OpenAI-compatible client, as proxies and agents use it."""

import pytest

from tests.clients.conftest import MODEL, QUESTION

pytestmark = pytest.mark.filterwarnings("ignore")  # litellm's own


@pytest.fixture(scope="module")
def litellm():
    return pytest.importorskip("litellm", reason="litellm is not installed")


@pytest.fixture
def arguments(server) -> dict[str, object]:
    return {
        "model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "messages": [QUESTION],
        "temperature": 0, "num_retries": 0,
    }  # fmt: skip


def test_whole_and_streamed_answers_are_the_same(litellm, arguments: dict[str, object]) -> None:
    answer = litellm.completion(**arguments)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(litellm.completion(**arguments, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text
    assert next(chunk.usage for chunk in chunks if getattr(chunk, "usage", None)).completion_tokens == (
        answer.usage.completion_tokens
    )


async def test_the_async_ways_give_the_same(litellm, arguments: dict[str, object]) -> None:
    answer = (await litellm.acompletion(**arguments)).choices[0].message.content
    stream = await litellm.acompletion(**arguments, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == answer


def test_text_completions_work(litellm, server) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{server.url}/v1", api_key="none",
        prompt="One, two, three,", temperature=0, max_tokens=6,
    )  # fmt: skip
    assert "four" in answer.choices[0].text


def test_errors_are_mapped_to_its_own(litellm, arguments: dict[str, object]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**(arguments | {"temperature": 3}))
    with pytest.raises(litellm.NotFoundError, match="gpt-4"):
        litellm.completion(**(arguments | {"model": "openai/gpt-4"}))


def test_an_overflow_falls_back_to_the_next_model(litellm, arguments: dict[str, object]) -> None:
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**(arguments | {"messages": long}))
    small = {key: value for key, value in arguments.items() if key in ("model", "api_base", "api_key")}
    large = {"model": "openai/large", "mock_response": "from the large one"}
    router = litellm.Router(
        model_list=[{"model_name": "small", "litellm_params": small}, {"model_name": "large", "litellm_params": large}],
        context_window_fallbacks=[{"small": ["large"]}], num_retries=0,
    )  # fmt: skip
    assert router.completion("small", messages=long).choices[0].message.content == "from the large one"
