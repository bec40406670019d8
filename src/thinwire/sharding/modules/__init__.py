"""The user's modules: which become units, what they take and return, and what some of them need in a narrow dtype."""
