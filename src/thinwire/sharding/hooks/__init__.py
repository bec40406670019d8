"""Hooks that report what PyTorch does to the runtime."""
