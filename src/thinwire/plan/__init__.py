"""The planner: rules, search, placement and explanation. Never imports torch."""
