"""What `gristmill.torch` offers for `layout: prefix_tree`."""
