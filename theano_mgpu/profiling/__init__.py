"""Time: timelines, measurements in turns, trials, and the model of scaling."""
