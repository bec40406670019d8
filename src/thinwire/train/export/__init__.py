"""From a run to a directory that ``transformers`` loads."""
