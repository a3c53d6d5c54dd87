"""langchain-openai and llama-index's OpenAILike."""

from __future__ import annotations

from typing import Literal

import pytest
from conftest import Served

QUESTION = "Tell me the capital of France."  # which this model answers by a wide margin


@pytest.fixture
def langchain(served: Served):  # type: ignore[no-untyped-def]
    module = pytest.importorskip("langchain_openai")
    return module.ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model=served.model, temperature=0,
                             max_tokens=120, stream_usage=True)


def test_langchain_asks_and_streams(langchain) -> None:  # type: ignore[no-untyped-def]
    whole = langchain.invoke(QUESTION)
    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0
    pieces = list(langchain.stream(QUESTION))
    assert "".join(piece.content for piece in pieces) == whole.content
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) == whole.usage_metadata[
        "output_tokens"]


def test_langchain_calls_a_tool(langchain) -> None:  # type: ignore[no-untyped-def]
    from langchain_core.tools import tool

    @tool
    def get_weather(city: Literal["Bergen", "Oslo"]) -> str:
        """The weather in a city."""
        return city

    answer = langchain.bind_tools([get_weather], tool_choice="get_weather").invoke("What is the weather in Oslo?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Bergen", "Oslo")


def test_langchain_gets_structured_output(langchain) -> None:  # type: ignore[no-untyped-def]
    from pydantic import BaseModel

    class City(BaseModel):
        name: Literal["Oslo", "Paris"]
        large: bool

    found = langchain.with_structured_output(City, method="json_schema").invoke("Name a city.")
    assert isinstance(found, City)


def test_llama_index_asks_and_streams(served: Served) -> None:
    module = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage

    client = module.OpenAILike(api_base=f"{served.url}/v1", api_key="none", model=served.model, is_chat_model=True,
                               temperature=0, max_tokens=24, context_window=4096)
    messages = [ChatMessage(role="user", content=QUESTION)]
    whole = client.chat(messages).message.content
    assert "Paris" in whole
    assert "".join(piece.delta or "" for piece in client.stream_chat(messages)) == whole
    assert client.complete("The capital of France is", max_tokens=4).text
