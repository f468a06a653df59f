"""rlagent: reinforcement learning of agents with the control inverted."""
