"""The GPU check: it proves on real cards what the rest of the tests can only prove on CPU.

``python -m benchmarks.gpu run`` runs it part by part. Each part is a process of its own, because a kernel that fails
leaves the device unusable to the process that launched it. Each part writes one JSON file as it ends, and
``python -m benchmarks.gpu render`` writes the page from these files.
"""

import thinwire  # noqa: F401  it prepares CUDA, which a part may start before it needs anything of ours
