"""Check that the contract against import cycles detects them."""

import pytest
from grimp import ImportGraph

from tests.import_circles import NoCircles


@pytest.mark.parametrize(
    ("imports", "kept"), [(["ab", "bc", "ac"], True), (["ab", "bc", "ca"], False), (["ab", "ba", "bc"], False)]
)
def test_import_cycles_are_detected(imports: list[str], kept: bool) -> None:
    graph = ImportGraph()
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported)
    contract = NoCircles("no circles", session_options={}, contract_options={})
    check = contract.check(graph, verbose=False)
    assert check.kept is kept
    if not kept:
        contract.render_broken_contract(check)
