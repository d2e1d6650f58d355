"""State that is not in the accelerator's memory: kept on a drive, crash-safe, and streamed through.

drive         a file of fixed size, read and written in place, past the page cache
directories   what holds a rank's files: who uses it, what earlier runs have left
manifest      what such a directory says of itself
generations   a rank's state in two files, one of which is whole at any moment
"""
