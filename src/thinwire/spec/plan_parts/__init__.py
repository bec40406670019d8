"""What a plan is made of: tables, presets and policies."""
