"""What happens in a step: its passes, its program, and what ranks say to each other at its end."""
