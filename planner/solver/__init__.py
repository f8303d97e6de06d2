"""The parts of the makespan solver; `planner.makespan.solve` puts them together."""
