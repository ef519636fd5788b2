"""What every server of dspark stands on: an address, TLS files, and gRPC with a clear end."""

from dspark.serving.addresses import address_of, listen
from dspark.serving.calls import Calls, Context
from dspark.serving.grpc_server import DRAIN_S, GrpcServer, Service, serve_grpc
from dspark.serving.tls import TlsFiles

__all__ = [
    "DRAIN_S",
    "Calls",
    "Context",
    "GrpcServer",
    "Service",
    "TlsFiles",
    "address_of",
    "listen",
    "serve_grpc",
]
