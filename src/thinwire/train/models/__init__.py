"""Models: Llama, GPT, and any causal language model of Hugging Face's ``transformers``.

Each is a plain ``nn.Module`` whose ``forward(input_ids, labels=None)`` returns a
:class:`~thinwire.train.models.common.CausalOutput`; labels are the next tokens.
"""
