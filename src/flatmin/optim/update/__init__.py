"""How the base takes its step: not if a gradient is not finite, and with a GradScaler."""
