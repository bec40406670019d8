"""Initial values from safetensors files."""
