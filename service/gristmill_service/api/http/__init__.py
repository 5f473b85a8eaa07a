"""The HTTP API: the same calls as over gRPC, for people, scripts, and programs without gRPC."""
