"""LoRA adapters: reading PEFT folders, naming them by content, and keeping them in device slots."""

if __name__ != "mlserve.adapters":
    raise ImportError(f"{__name__!r} is mlserve's own mlserve.adapters: keep the repository off sys.path (python -P)")
