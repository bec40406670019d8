"""Checkpoints on disk: sharded vectors as safetensors files, a manifest that proves them whole, atomic directories."""
