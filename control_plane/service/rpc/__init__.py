"""gRPC services for users and agents."""
