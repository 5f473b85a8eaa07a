"""The parts of adapters that do not depend on the trainer. Importing them imports neither PyTorch nor gRPC."""
