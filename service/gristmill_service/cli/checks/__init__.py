"""What `gristmill doctor` looks at: the service's addresses, this machine, and Redis."""
