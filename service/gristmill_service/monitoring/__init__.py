"""Views of runs from outside: metrics, health, history and batch views. Nothing here decides for a run."""
