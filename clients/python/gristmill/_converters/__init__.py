"""How each framework's rollouts become rows. Imports none of them: objects are read by their attributes and keys."""
