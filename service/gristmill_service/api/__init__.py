"""The two APIs, gRPC and HTTP. They translate requests to the functions of `calls`, and their answers back."""
