"""The SDK in an ordinary program. Start a server (`dspark serve`), then:

    DSPARK_ADDRESS=127.0.0.1:50051 python examples/sdk_sync.py

DSPARK_API_KEY is sent if it is set.
"""

from __future__ import annotations

import os
import sys

from dspark.client import Client, InvalidRequest, SamplingParams


def main() -> None:
    address = os.environ.get("DSPARK_ADDRESS", "127.0.0.1:50051")
    with Client(address, api_key=os.environ.get("DSPARK_API_KEY")) as client:
        model = client.model_info()
        print(f"{model.name}: {model.sequence_tokens} tokens, drafters: {model.drafters}")

        # A whole answer.
        answer = client.chat("Why is the sky blue?", max_tokens=60, temperature=0.0)
        print(f"\n{answer.text!r} ({answer.finish_reason}, {answer.choices[0].usage})")

        # The same as it comes. A server that restarts meanwhile costs a pause and nothing else.
        with client.stream("Once upon a time", max_tokens=60, seed=7) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        figures = stream.generation.choices[0].speculation
        print(f"\n{figures.accepted_length:.2f} tokens a round")

        # Several choices, with parameters kept for reuse.
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20, stop=("\n",))
        for choice in client.generate("The three laws are", params=params, n=3).choices:
            print(f"{choice.index}: {choice.text!r}")

        # What cannot be served says which field, which value, and which limit.
        try:
            client.generate("Hello", temperature=-1.0)
        except InvalidRequest as error:
            print(f"refused: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
