"""Text in, samples out: documents, a tokenizer, token bins on disk, and the part of a step that a rank computes."""
