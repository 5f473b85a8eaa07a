"""Rows as they are received: judged, filtered, and merged where one continues another."""
