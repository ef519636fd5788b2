"""What gRPC says of a connection that TLS keeps from being made, in words that tell what to do."""

from __future__ import annotations

import re

# What stands in gRPC's words, and what it means to a client that uses TLS itself.
_SECURED = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by the authority that tls.ca names",
    "Hostname Verification Check failed": (
        "its certificate carries neither the host that we call it by nor tls.server_name"
    ),
    "WRONG_VERSION_NUMBER": "it speaks no TLS, and tls here asks for it",
    "Socket closed": "it closed the connection at once: it may not trust our certificate",
    "Connection reset": "it closed the connection at once: it may not trust our certificate",
}
_PLAIN = {
    "Socket closed": "it closed the connection at once: it may ask for TLS, and there is no tls "
    "here",
    "Connection reset": "it closed the connection at once: it may ask for TLS, and there is no "
    "tls here",
}


def plain_words(details: str, *, secured: bool) -> str:
    """The same, or what it means and for which address. secured: whether the client uses TLS."""
    if not details.startswith("failed to connect"):
        return details
    for words, meaning in (_SECURED if secured else _PLAIN).items():
        if words in details:
            address = re.search(r"ipv[46]:(\S+): ", details)
            return f"{address[1]}: {meaning}" if address else meaning
    return details


def is_about_tls(words: str) -> bool:
    """Whether `plain_words` found that TLS keeps the connection from being made."""
    return any(meaning in words for meaning in (*_SECURED.values(), *_PLAIN.values()))
