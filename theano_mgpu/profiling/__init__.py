"""Where time goes: timeline, trials, and the model of scaling."""
