"""How a report looks: light and dark by the reader's wish, in one column that fits a phone."""

from orchestrrl.lab.sim.report_page.svg import COLOURS

CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2a33; --faint: #5d6b77; --rule: #d8dee4; --card: #f5f7f9;
  --c0: #2a6fbb; --c1: #c8501e; --c2: #2e8b57; --c3: #8048b5;
  --c4: #9a7400; --c5: #c2316f; --c6: #4b5a66; --c7: #0f7f8c;
  --c8: #6b3f1d; --c9: #93a8bb; }
@media (prefers-color-scheme: dark) { :root { --paper: #14191e; --ink: #e6ebef; --faint: #9daab5; --rule: #35404a;
  --card: #1c232a; --c0: #6aaaf0; --c1: #f08a5d; --c2: #5fc48a; --c3: #bf94ee;
  --c4: #e0b347; --c5: #f285b4; --c6: #a5b3bf; --c7: #4fc3d4;
  --c8: #d0a27a; --c9: #66788a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--rule); }
h3 { margin-bottom: .3rem; font-size: 1rem; }
p, figcaption { max-width: 46rem; } figcaption, .note { color: var(--faint); font-size: .875rem; }
nav ul, ul.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: .4rem 0; padding: 0; list-style: none; }
ul.legend { font-size: .875rem; } .key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
svg.key { width: 2.4em; height: .3em; vertical-align: middle; }
figure { margin: .6rem 0 1.4rem; } .wide { overflow-x: auto; }
.wide > svg { display: block; width: 100%; min-width: 38rem; max-width: 54rem; }
table { border-collapse: collapse; font-size: .875rem; } th, td { padding: .3rem .7rem; text-align: right;
  border-bottom: 1px solid var(--rule); font-variant-numeric: tabular-nums; }
td { white-space: nowrap; } thead th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
tbody th { min-width: 9rem; font-weight: 400; } tr.best th { font-weight: 700; }
th:first-child { position: sticky; left: 0; padding-left: 0; background: var(--paper); text-align: left; }
td.word, th.word { text-align: left; }
a { color: var(--c0); } code, pre { font-family: ui-monospace, monospace; font-size: .85rem; }
pre { padding: .8rem; overflow-x: auto; background: var(--card); }
details > summary { cursor: pointer; padding: .25rem 0; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; paint-order: stroke; stroke: var(--paper);
  stroke-width: 3px; stroke-linejoin: round; }
svg text.axis, svg text.tick { fill: var(--faint); }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .stroke { fill: none; stroke-width: 2; }
svg circle { stroke: var(--paper); stroke-width: 1; } svg .ringed { stroke: var(--ink); stroke-width: 2; }
svg .d1 { stroke-dasharray: 7 3; } svg .d2 { stroke-dasharray: 2 2; } svg .d3 { stroke-dasharray: 9 3 2 3; }
svg .d4 { stroke-dasharray: 12 4; } svg .d5 { stroke-dasharray: 4 4; } svg .d6 { stroke-dasharray: 1 3; }
svg .d7 { stroke-dasharray: 6 2 1 2 1 2; } svg .edge { stroke-width: 1; stroke-dasharray: 5 4; }
""" + "".join(
    f"svg .fill.c{n} {{ fill: var(--c{n}); }} svg .stroke.c{n} {{ stroke: var(--c{n}); }}"
    f" .key.c{n} {{ background: var(--c{n}); }}\n"
    for n in range(COLOURS)
)
