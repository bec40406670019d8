"""``thinwire train``: training by a recipe, and the plan that it chooses."""
