"""The servers of Redis: connections, masters, copies, and how they fare."""
