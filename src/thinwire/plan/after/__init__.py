"""After a run: what was expected of it beside what was measured, and what explains the difference."""
