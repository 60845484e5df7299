"""LoRA adapters: reading PEFT folders, naming them by content, and keeping them in device slots."""
