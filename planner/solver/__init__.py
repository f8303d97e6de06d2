"""The parts of the makespan solver; `planner.solver.makespan.solve` puts them together."""
