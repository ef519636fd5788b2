"""The SDK of dspark: `Client` for ordinary programs, `AsyncClient` for asyncio.

    from dspark.client import Client

    with Client("localhost:50051", api_key="...") as client:
        answer = client.chat("Why is the sky blue?", max_tokens=100, temperature=0.7)
        print(answer.text, answer.finish_reason, answer.choices[0].usage)

Needs grpcio, protobuf and numpy; no torch. Runnable programs: examples/sdk_sync.py, sdk_async.py.
"""

from dspark.client.async_client import AsyncClient, AsyncStream
from dspark.client.connection import Tls
from dspark.client.request_client import Message, Options, Prompt
from dspark.client.results import Choice, Chunk, DrafterInfo, Generation, ModelInfo
from dspark.client.retry import Retry
from dspark.client.sync_client import Client, Stream
from dspark.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    DsparkError,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from dspark.core.requests import (
    FinishReason,
    Speculation,
    SpeculationFigures,
    TokenLogprob,
    Usage,
)
from dspark.core.sampling import SamplingParams

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Choice",
    "Chunk",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "DrafterInfo",
    "DsparkError",
    "FinishReason",
    "Generation",
    "InvalidRequest",
    "Message",
    "ModelError",
    "ModelInfo",
    "NotFound",
    "Options",
    "Overloaded",
    "Prompt",
    "Retry",
    "SamplingParams",
    "Speculation",
    "SpeculationFigures",
    "Stream",
    "Tls",
    "TokenLogprob",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
