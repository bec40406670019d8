"""Peak memory of one rank, by how long what it holds lives.

Model states live from step to step (``states.py``), activations from forward to backward (``activations.py``), gathered
units and gradients on their way for a while (``workspace.py``). The ranks of a pipeline differ (``stages.py``), and the
one that needs the most counts (``peak.py``). ``peers.py`` has the formulae of other systems.
"""
