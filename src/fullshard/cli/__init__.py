"""The command line: one file a verb. What a verb needs is imported when the verb runs."""
