"""[Note: codec benchmark terms]

*Direction*: one public operation of a codec (``encode``, ``decode``, ``decode_add`` and the fused forms). *Job*: one
direction of one codec or peer on one tensor, ready to be called; memcpy is one too. *Bench*: all jobs of one dtype and
size; they take turns in rounds. *Data set*: named values for the error of a codec. *Gate*: the checks without which a
codec's figures are not reported. Speeds always count the bytes of the tensor, never those of the message.
"""
