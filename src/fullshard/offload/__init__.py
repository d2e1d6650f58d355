"""Offloaded state: kept in host memory or on a drive, crash-safe, and streamed through group by group.

drive                a file of fixed size, read and written in place, bypassing the page cache
directories          a rank's directory: its lock, and the files that earlier runs left
generation_manifest  on-disk metadata of such a directory
generations          a rank's state in two files, one of which is complete at any moment
"""
