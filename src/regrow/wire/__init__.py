"""What JAX clients speak: messages, HTTP/2, gRPC, and the service that joins them."""
