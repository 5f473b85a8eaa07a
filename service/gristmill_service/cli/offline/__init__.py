"""Commands on files, without a service."""
