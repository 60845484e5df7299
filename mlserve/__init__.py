"""mlserve: many LoRA adapters and images on one base model, in one batch, over one shared pool of KV blocks."""
