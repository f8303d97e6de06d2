"""A contract for import-linter: no import cycle between files, ignoring imports for annotations only."""

from graphlib import CycleError, TopologicalSorter

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class NoCircles(Contract):
    """Forbids import cycles. It has no settings. A broken contract shows one cycle; there may be more."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        ours = {module for module in graph.modules if not graph.is_module_squashed(module)}
        imports = {module: graph.find_modules_directly_imported_by(module) & ours for module in ours}
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            return ContractCheck(kept=False, metadata={"circle": error.args[1]})
        return ContractCheck(kept=True)

    def render_broken_contract(self, check: ContractCheck) -> None:
        # The sorter lists each file before those that import it.
        output.print_error(" is imported by\n".join(check.metadata["circle"]))
