"""The page's look: one column on a phone, up to three on a desk; light, dark and on paper.

Line colours are told apart with the common kinds of colour blindness, and reach a contrast of 3 to
1 on their background.
"""

_LIGHT = """
  --paper: #ffffff; --card: #f7f8fa; --ink: #1b1f24; --muted: #5b6470; --line: #dfe3e8;
  --alarm: #b3261e; --good: #14724a; --bad: #b3261e; --unsure: #8a5300; --quiet: #5b6470;
  --c0: #0060a8; --c1: #c2480b; --c2: #14805e; --c3: #8f3d87; --c4: #8a6800; --c5: #2b8cbe;
  --c6: #6b6f76;
"""
_DARK = """
  --paper: #14171b; --card: #1c2026; --ink: #e8ebef; --muted: #a2acb8; --line: #333a43;
  --alarm: #ff8a7d; --good: #5fd0a0; --bad: #ff8a7d; --unsure: #f0b35c; --quiet: #a2acb8;
  --c0: #6db6ff; --c1: #ff9a5c; --c2: #4fcf9f; --c3: #e29bdc; --c4: #e3c04d; --c5: #8fd3f4;
  --c6: #b8bec6;
"""

STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ color-scheme: light; {_LIGHT} }} }}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; max-width: 80rem; padding: 1.25rem clamp(0.9rem, 3vw, 2rem) 3rem;
  background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  -webkit-text-size-adjust: 100%; font-variant-numeric: tabular-nums;
}}
h1, h2, h3, p, dl, dd, figure {{ margin: 0; }}
header {{
  display: flex; flex-wrap: wrap; gap: 0 1rem; align-items: baseline;
  justify-content: space-between; color: var(--muted); font-size: 0.875rem;
  margin-bottom: 1rem;
}}
h1 {{ font-size: 1rem; font-weight: 600; color: var(--ink); }}
h2 {{ font-size: 1.15rem; font-weight: 600; margin: 2.25rem 0 0.75rem; }}
h3 {{ font-size: 0.95rem; font-weight: 600; overflow-wrap: anywhere; }}
a {{ color: inherit; }}
.grid {{
  display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr));
}}
.runs {{ display: grid; gap: 1rem; grid-template-columns: minmax(0, 1fr); }}
.runs.several {{ grid-template-columns: repeat(auto-fit, minmax(min(21rem, 100%), 1fr)); }}
.run, figure {{
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem; min-width: 0;
}}
.run {{ border-left: 5px solid var(--tone); padding: 1.1rem 1.25rem 1.25rem; }}
.name {{ font-size: 0.875rem; color: var(--muted); overflow-wrap: anywhere; }}
.key {{
  display: inline-block; width: 0.7em; height: 0.7em; border-radius: 2px; margin-right: 0.45em;
  background: var(--key);
}}
.verdict {{ font-size: clamp(1.25rem, 1rem + 1.3vw, 1.75rem); line-height: 1.25;
  font-weight: 650; margin: 0.35rem 0 0.25rem; overflow-wrap: anywhere; }}
.several .verdict {{ font-size: 1.2rem; }}
.verdict .sign {{ color: var(--tone); margin-right: 0.35em; }}
.why {{ max-width: 46rem; overflow-wrap: anywhere; }}
.note {{ color: var(--muted); font-size: 0.875rem; margin-top: 0.75rem; overflow-wrap: anywhere; }}
.good {{ --tone: var(--good); }} .bad {{ --tone: var(--bad); }}
.unsure {{ --tone: var(--unsure); }} .quiet {{ --tone: var(--quiet); }}
.facts {{
  display: grid; gap: 0.9rem 1.25rem; margin-top: 1.1rem;
  grid-template-columns: repeat(auto-fill, minmax(clamp(7.5rem, 14vw, 10.5rem), 1fr));
}}
.several .facts {{ grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); }}
.facts dt {{ font-size: 0.8rem; color: var(--muted); }}
.facts dd {{ font-size: 1.25rem; font-weight: 600; line-height: 1.3; }}
.facts dd small {{
  display: block; font-size: 0.8rem; font-weight: 400; color: var(--muted);
}}
.strip {{ margin-top: 1.1rem; max-width: 40rem; font-size: 0.8rem; color: var(--muted); }}
.strip div {{
  display: grid; grid-template-columns: 4.5rem 1fr; align-items: center; height: 1.35rem;
}}
.strip .track {{ position: relative; height: 0.5rem; background: var(--line);
  border-radius: 4px; display: block; }}
.strip .range {{ position: absolute; top: 0; height: 100%; border-radius: 4px; min-width: 3px;
  background: var(--muted); }}
.strip .now .range {{ background: var(--tone); }}
figure h3 + p {{ font-size: 0.8rem; color: var(--muted); }}
figure svg {{
  display: block; width: 100%; height: auto; overflow: visible; margin: 0.4rem 0 0.3rem;
}}
figure svg * {{ stroke-linejoin: round; }}
figure svg text {{ font-family: inherit; }}
figcaption {{ margin-top: 0.4rem; font-size: 0.85rem; color: var(--muted); line-height: 1.4; }}
.keys {{ display: flex; flex-wrap: wrap; gap: 0.1rem 0.9rem; list-style: none; margin: 0.35rem 0 0;
  padding: 0; font-size: 0.8rem; }}
.keys li {{ display: flex; align-items: center; min-width: 0; overflow-wrap: anywhere; }}
.keys svg {{ width: 1.6rem; height: 0.6rem; margin: 0 0.4rem 0 0; flex: none; }}
details {{ margin-top: 0.5rem; font-size: 0.8rem; }}
summary {{ cursor: pointer; color: var(--muted); width: fit-content; }}
.scroll {{ overflow-x: auto; max-width: 100%; }}
table {{ border-collapse: collapse; font-size: 0.8rem; margin-top: 0.4rem; width: 100%; }}
.wide table {{ font-size: 0.85rem; }}
th, td {{ text-align: right; padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }}
th {{ color: var(--muted); font-weight: 500; }}
th:first-child, td:first-child, .text {{ text-align: left; }}
td.text {{ white-space: pre-wrap; overflow-wrap: anywhere; min-width: 9rem; }}
code {{ font: 0.95em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }}
td.text code {{ background: color-mix(in srgb, var(--line) 60%, transparent); padding: 0 0.2em;
  border-radius: 3px; }}
footer {{ margin-top: 2.5rem; color: var(--muted); font-size: 0.8rem; overflow-wrap: anywhere; }}
@media print {{
  body {{ max-width: none; padding: 0; font-size: 10pt; }}
  .grid {{ grid-template-columns: repeat(2, minmax(0, 1fr)); }}
  figure, .run, tr {{ break-inside: avoid; }}
  h2 {{ break-after: avoid; }}
  summary {{ display: none; }}
}}
"""
