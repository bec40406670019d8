"""The space of plans: every valid one in compact form, with its memory and a lower bound of its step."""
