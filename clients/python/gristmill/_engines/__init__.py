"""What the recorder and `gristmill.capture` request from engines, and what they remove from the answers again."""
