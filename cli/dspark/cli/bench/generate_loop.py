"""transformers' `generate` behind standard input: `python -m dspark.cli.bench.generate_loop MODEL
DTYPE THREADS`. Reads an ask a line, writes a line a token and then one with the usage."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    import torch
    import transformers

    from dspark.models import load_target, load_tokenizer, resolve

    model_name, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if threads:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # as our own server does
    path = resolve(model_name)
    tokenizer = load_tokenizer(path)
    model: Any = load_target(path, dtype=getattr(torch, dtype), device="cpu")

    class Lines(transformers.generation.BaseStreamer):  # type: ignore[misc]
        """A line for each token; what comes first is the prompt."""

        def __init__(self) -> None:
            self.prompt = True

        def put(self, value: torch.Tensor) -> None:
            if not self.prompt:
                say({"tokens": value.numel()})
            self.prompt = False

        def end(self) -> None:
            pass

    spin = os.environ.get("GOMP_SPINCOUNT")
    say({"dtype": dtype, "threads": torch.get_num_threads(), "spin": spin})
    for line in sys.stdin:
        ask = json.loads(line)
        prompt = tokenizer.apply_chat_template(
            ask["messages"], add_generation_prompt=True, return_dict=False
        )
        whole = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            min_new_tokens=ask["max_tokens"],
            max_new_tokens=ask["max_tokens"],
            pad_token_id=0,
            streamer=Lines(),
        )
        made = int(whole.shape[1]) - len(prompt)
        say({"prompt_tokens": len(prompt), "completion_tokens": made})


def say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
