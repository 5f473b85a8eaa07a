"""The journal: stores runs in files of one machine, on disk or on a tmpfs that outlives the process."""
