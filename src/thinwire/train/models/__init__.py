"""Models: Llama, GPT, and any causal language model of Hugging Face's ``transformers``.

Each model is a plain ``nn.Module`` with a ``forward(input_ids, labels=None)`` that returns a
:class:`~thinwire.train.models.common.CausalOutput`; labels are the next tokens.
"""
