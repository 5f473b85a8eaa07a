"""The gRPC front door."""
