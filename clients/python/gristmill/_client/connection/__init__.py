"""The connection to the service: channels, credentials, calls with deadlines and retries. Not public."""
