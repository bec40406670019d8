"""The ranks of a run on this machine as processes: forked, watched, and started again."""
