"""What is asked over gRPC, and how it is answered."""
