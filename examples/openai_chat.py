"""The official `openai` client against a server of ours. Start one (`dspark serve`), then:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python examples/openai_chat.py

OPENAI_API_KEY is sent if it is set; a server without a key file takes any.
"""

from __future__ import annotations

import os

import openai


def main() -> None:
    client = openai.OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    print(f"model: {model}")

    # A whole answer. What the API does not know goes into extra_body.
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sky blue? One sentence."}],
        max_tokens=60,
        temperature=0,
        extra_body={"speculation": {"gamma": 4}, "deadline": 60},
    )
    print(answer.choices[0].message.content)
    assert answer.usage is not None
    print(answer.usage.to_dict()["speculation"])

    # As it comes. An error in the middle is an openai.APIError here, not a short answer.
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Count to five."}],
        max_tokens=60,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.completion_tokens} tokens")

    # What cannot be served says which field, which value, and which limit.
    try:
        client.completions.create(model=model, prompt="Hello", temperature=-1)
    except openai.BadRequestError as error:
        print(f"refused: {error.param}: {error.message}")


if __name__ == "__main__":
    main()
