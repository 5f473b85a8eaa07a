"""The two front doors, gRPC and HTTP. They translate calls to a run's methods and back, and nothing more."""
