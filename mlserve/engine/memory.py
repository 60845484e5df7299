"""How much of a GPU's memory the KV pool may take: what is free, less what others will still need."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KV_SHARE", "Claims", "graph_bytes", "kv_budget"]

# Of what the claims leave. The rest is for what isn't measured: holes in torch's allocator, image towers, embeddings
# that requests hold, and adapters while they are copied into their slots.
KV_SHARE = 0.92
# Of all graphs: their nodes, attention's partial results, and what the widest decode step holds beside its logits. An
# estimate: 70 graphs of 400 kernels, 2**20 tokens of context.
GRAPH_BYTES = 3 * 2**27


@dataclass(frozen=True, slots=True)
class Claims:
    """Bytes of device memory that are still free and already spoken for."""

    weights: int = 0  # of a model that isn't loaded yet
    activations: int = 0  # the most that a step holds at once, sampling included
    adapters: int = 0  # all slots, once adapters have changed every linear
    graphs: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.activations + self.adapters + self.graphs


def kv_budget(free: int, claims: Claims) -> int:
    """Bytes for the KV pool, of `free` on the device; 0 if the claims leave nothing."""
    return max(int(KV_SHARE * (free - claims.total)), 0)


def graph_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """What captured decode steps will hold: logits in the dtype of the weights, in float32, and once more to stay."""
    return GRAPH_BYTES + max_num_seqs * vocab_size * (4 + 4 + 4)
