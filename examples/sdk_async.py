"""The SDK in an asyncio program. Start a server (`dspark serve`), then:

    DSPARK_ADDRESS=127.0.0.1:50051 python examples/sdk_async.py

DSPARK_API_KEY is sent if it is set.
"""

from __future__ import annotations

import asyncio
import os

from dspark.client import AsyncClient, DeadlineExceeded, Message, Overloaded

QUESTIONS = ("What is a drafter?", "What is a target?", "Name a prime number.")


async def ask(client: AsyncClient, question: str) -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": question},
    ]
    try:
        answer = await client.chat(messages, max_tokens=40, temperature=0.0, deadline_s=60)
        print(f"{question} {answer.text!r}")
    except DeadlineExceeded:
        print(f"{question} took too long")
    except Overloaded as error:
        print(f"{question} come again in {error.retry_after_s:.0f} s")


async def main() -> None:
    address = os.environ.get("DSPARK_ADDRESS", "127.0.0.1:50051")
    async with AsyncClient(address, api_key=os.environ.get("DSPARK_API_KEY")) as client:
        print(f"{(await client.model_info()).name} answers")

        # Many at once: the server answers them in one batch.
        await asyncio.gather(*(ask(client, question) for question in QUESTIONS))

        # Leaving a stream early cancels the rest in the server.
        async with client.stream("1, 2, 3, 4,", max_tokens=200, temperature=0.0) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
                if len(stream.generation.token_ids) >= 20:
                    break
        print()


if __name__ == "__main__":
    asyncio.run(main())
