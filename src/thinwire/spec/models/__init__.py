"""The shapes of models."""
