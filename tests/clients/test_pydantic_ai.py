"""pydantic-ai's two models of OpenAI: conversations, and what it makes of an overflow."""

import pytest

from tests.clients.conftest import MODEL

pytestmark = pytest.mark.filterwarnings("ignore")  # pydantic-ai's own

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
openai_models = pytest.importorskip("pydantic_ai.models.openai", reason="pydantic-ai has no openai")


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def agent(request: pytest.FixtureRequest, server):
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(
        base_url=f"{server.url}/v1", api_key="none"
    )
    model = getattr(openai_models, request.param)(MODEL, provider=provider)
    return pydantic_ai.Agent(model, model_settings={"max_tokens": 20, "temperature": 0}, retries=0)


async def test_a_conversation_has_a_second_turn(agent) -> None:
    first = await agent.run("I am Bob.")
    assert (await agent.run("Who am I?", message_history=first.all_messages())).output


async def test_an_overflow_is_told_with_its_code(agent) -> None:
    with pytest.raises(pydantic_ai.exceptions.ModelHTTPError) as raised:
        await agent.run("word " * 9000)
    assert (raised.value.status_code, raised.value.body["code"]) == (400, "context_length_exceeded")
