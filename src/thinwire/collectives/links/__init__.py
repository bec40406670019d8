"""Connections between ranks: gloo's, NCCL's, and the streams that a device's run on."""
