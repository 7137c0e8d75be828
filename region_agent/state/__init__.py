"""The agent's durable state."""
