"""What all commands share: the console, errors, options, and loading on demand."""
