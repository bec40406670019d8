"""Benchmarks of several systems in one run: ranks on the lab's hosts, taking turns."""
