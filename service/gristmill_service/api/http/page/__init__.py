"""The page's own calls, and how people sign in to it."""
