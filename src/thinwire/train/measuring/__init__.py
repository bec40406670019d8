"""Measuring this machine for the planner: its memory, the parts of models, and the plan that follows."""
