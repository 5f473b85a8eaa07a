"""The gRPC and HTTP APIs. They translate requests to functions of `calls`, and the answers back."""
