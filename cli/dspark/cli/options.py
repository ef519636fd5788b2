"""Options that several commands share, each with its help written once."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from dspark.core.sampling import SamplingParams, check_sampling

TARGET = "Target and drafter"
SAMPLING = "Sampling"
OUTPUT = "Input and output"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="A name of `dspark models`, a directory, a GGUF file or a hub id.",
        rich_help_panel=TARGET,
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        help="native (one C++ step on CPUs), transformers, or auto: native where it serves.",
        rich_help_panel=TARGET,
    ),
]
DType = Annotated[
    str,
    typer.Option(
        "--dtype", help="float32, bfloat16, or int8 (native only).", rich_help_panel=TARGET
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda or cuda:N.", rich_help_panel=TARGET)
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads", help="Threads of the forward pass; 0 takes all cores.", rich_help_panel=TARGET
    ),
]
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        help="auto (the one that comes with dspark for the model, else ngram), ngram, none, or a "
        "trained one: a directory or hub id.",
        rich_help_panel=TARGET,
    ),
]
Gamma = Annotated[
    int,
    typer.Option(
        "--gamma", help="Draft tokens a round at most; 0 is none.", rich_help_panel=TARGET
    ),
]
Verify = Annotated[
    str,
    typer.Option(
        "--verify",
        help="How many of them are verified: early-stop, top-k, fixed:N, threshold:X or none.",
        rich_help_panel=TARGET,
    ),
]
KVTokens = Annotated[
    int,
    typer.Option("--kv-tokens", help="Room of the KV cache, tokens.", rich_help_panel=TARGET),
]
System = Annotated[
    str | None, typer.Option("--system", help="A system message.", rich_help_panel=OUTPUT)
]
MinTokens = Annotated[
    int, typer.Option("--min-tokens", help="Do not end before.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float,
    typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING),
]
TopK = Annotated[int, typer.Option("--top-k", help="0 or -1 is off.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option("--top-p", help="In (0, 1].", rich_help_panel=SAMPLING)]
MinP = Annotated[float, typer.Option("--min-p", help="In [0, 1].", rich_help_panel=SAMPLING)]
Presence = Annotated[
    float, typer.Option("--presence-penalty", help="In [-2, 2].", rich_help_panel=SAMPLING)
]
Frequency = Annotated[
    float, typer.Option("--frequency-penalty", help="In [-2, 2].", rich_help_panel=SAMPLING)
]
Repetition = Annotated[
    float,
    typer.Option("--repetition-penalty", help="Above 0; 1 is off.", rich_help_panel=SAMPLING),
]
LogitBias = Annotated[
    str,
    typer.Option("--logit-bias", help="JSON, e.g. '{\"198\": -100}'.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Makes the text reproducible.", rich_help_panel=SAMPLING),
]
Choices = Annotated[
    int, typer.Option("--n", "-n", help="Answers to each prompt.", rich_help_panel=SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End before this text; may be repeated.", rich_help_panel=SAMPLING),
]
StopId = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-id", help="End at this token id; may be repeated.", rich_help_panel=SAMPLING
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the model's end.", rich_help_panel=SAMPLING)
]
Logprobs = Annotated[
    bool,
    typer.Option(
        "--logprobs", help="Log-probability of each token, in JSON.", rich_help_panel=SAMPLING
    ),
]
TopLogprobs = Annotated[
    int,
    typer.Option("--top-logprobs", help="And of so many alternatives.", rich_help_panel=SAMPLING),
]


def checked(params: SamplingParams) -> SamplingParams:
    """The same, or InvalidRequest for all that can be refused before a model is loaded; token ids
    wait for its vocabulary."""
    check_sampling(replace(params, logit_bias={}, stop_ids=()), vocab_size=1)
    return params
