"""The HTTP API: the same calls as over gRPC, for people, scripts and machines without gRPC."""
