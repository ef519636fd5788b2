"""The scheduler over gRPC: its servicer, and the client of everybody that asks it."""
