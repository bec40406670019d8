"""The command line. It stands above both columns: it plans, then trains, then draws."""
