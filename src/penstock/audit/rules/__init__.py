"""What is an alarm: a file for each subject. A rule remembers what it needs between two looks, and does no I/O."""
