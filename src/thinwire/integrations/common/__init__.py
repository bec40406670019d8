"""What the plug-ins of several frameworks share."""
