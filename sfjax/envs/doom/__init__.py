"""ViZDoom: scenarios as records, one environment over the engine, and what a kill leaves."""
