"""Images: safe decoding, identity, towers, and the cache of their embeddings."""
