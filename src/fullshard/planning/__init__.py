"""From a question or a Run to a Plan: the model described, the hardware found, the planner asked."""
