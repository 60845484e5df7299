"""Images: safe decoding, identity, towers, and the cache of their embeddings."""

if __name__ != "mlserve.vision":
    raise ImportError(f"{__name__!r} is mlserve's own mlserve.vision: keep the repository off sys.path (python -P)")
