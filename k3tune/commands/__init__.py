"""What the commands do once :mod:`k3tune.cli` has read their options."""
