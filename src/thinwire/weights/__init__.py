"""Weights over thin wires: a trainer publishes versions of its weights to a store, and generators elsewhere follow.

Every rank publishes what it owns; nothing is gathered. A version is one file for each rank, and is there once all of
them are. ``parts.py`` says what a file holds, ``owned.py`` which rank owns what, ``stores.py`` where files are,
``kept.py`` how a receiver keeps a version on disk, ``files.py`` how files of transformers cut weights, ``serving.py``
how a directory is served.
"""

from thinwire.weights.following import Subscriber
from thinwire.weights.publishing import Publisher, publisher

__all__ = ["Publisher", "Subscriber", "publisher"]
