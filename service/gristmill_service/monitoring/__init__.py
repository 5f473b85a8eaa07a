"""What is seen of runs from outside: metrics, health, history and batch views. Decides nothing."""
