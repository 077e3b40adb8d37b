"""Built-in workloads on real data that packages carry."""
