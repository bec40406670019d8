"""The job that a process is part of: how its ranks find each other, its groups, and its failures."""
