"""The durable data buffer."""
