"""The journal: what lasts of runs, in files of one machine. On disk, or on a tmpfs that outlives the process."""
