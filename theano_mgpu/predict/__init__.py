"""Inference: batches dispatched to replicas, outputs in order."""
