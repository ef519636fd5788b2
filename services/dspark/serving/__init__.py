"""What every server of dspark stands on: an address, TLS files, and gRPC with a clear end."""

from dspark.serving.addresses import address_of, listen
from dspark.serving.calls import Calls, Context
from dspark.serving.grpc_server import DRAIN_S, GrpcServer, Service, serve_grpc
from dspark.serving.plain_words import is_about_tls, plain_words
from dspark.serving.ports import on_first_free
from dspark.serving.tls import PeerFiles, TlsFiles, named

__all__ = [
    "DRAIN_S",
    "Calls",
    "Context",
    "GrpcServer",
    "PeerFiles",
    "Service",
    "TlsFiles",
    "address_of",
    "is_about_tls",
    "listen",
    "named",
    "on_first_free",
    "plain_words",
    "serve_grpc",
]
