"""The rules of the alarms, a file for each subject. A rule keeps its own state between evaluations. No I/O."""
