"""ViZDoom: the scenarios, the environment, and what keeps engines from outliving their owner."""
