"""What really happened: bytes, seconds, hardware."""
