"""The gateway: what stands between a client's words and a verifier's ids."""

from dspark.gateway.text import TextPiece, TextStream
from dspark.gateway.tokenizer import Tokenizer

__all__ = ["TextPiece", "TextStream", "Tokenizer"]
