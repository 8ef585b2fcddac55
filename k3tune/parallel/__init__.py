"""The base spread over processes: experts, trunk. Single-device model code knows nothing of it."""
