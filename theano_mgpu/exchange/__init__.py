"""Values that replicas exchange. Sums are added in an order (any; a tree), by a channel (the host; NCCL; none)."""
