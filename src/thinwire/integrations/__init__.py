"""thinwire in the loops of other frameworks. Each module needs its framework; importing this package needs none.

- :mod:`thinwire.integrations.transformers`: ``Trainer`` of Hugging Face's transformers, and what is built on it.
- :mod:`thinwire.integrations.accelerate`: a loop of one's own with Hugging Face's accelerate.
- :mod:`thinwire.integrations.lightning`: ``Trainer`` of Lightning.
- :mod:`thinwire.integrations.fabric`: ``Fabric`` of Lightning.
"""
