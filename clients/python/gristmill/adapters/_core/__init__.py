"""The part of an adapter that does not depend on its trainer. Importing it imports neither PyTorch nor gRPC."""
