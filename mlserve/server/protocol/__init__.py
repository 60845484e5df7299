"""What clients send and get: the bodies of requests and responses."""
