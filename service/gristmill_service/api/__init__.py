"""The gRPC and HTTP APIs. They convert requests to calls of functions of `calls`, and the answers back."""
