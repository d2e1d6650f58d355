"""Planning, from a command or a Run to a Plan: describes the model, finds the hardware, calls the planner."""
