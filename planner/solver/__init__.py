"""The parts of the makespan solver; its entry point is `planner.solver.makespan.solve`."""
