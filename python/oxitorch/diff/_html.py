"""The report as one page of HTML: nothing is loaded, nothing runs. It looks as preflight's page does."""

from collections.abc import Iterable
from html import escape
from textwrap import dedent

from oxitorch import _core
from oxitorch.diff import _text

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<p class="command">{command}</p>
</header>
{body}
</main>
</body>
</html>
"""
_ROWS = 200
_TONES = {
    "defect": "bad",
    "unknown": "doubt",
    "random": "doubt",
    "arguments": "doubt",
    "tie": "good",
    "rounding": "good",
    "carried": "good",
}


def page(data: dict) -> str:
    parts = [_answer(data)]
    parts += [_finding(data, f) for f in data["findings"]]
    first = data["first"]
    if first is not None and first not in data["findings"]:
        parts.append(_section("The first difference", _place(first) + _finding_body(data, first)))
    if lines := _text.not_finite(data):
        parts.append(_section("Not finite", _lines(lines)))
    parts += [_steps(data), _modules(data), _gradients(data)]
    scripts = [" ".join(data[side].get("script") or []) for side in ("a", "b")]
    script = " | ".join(dict.fromkeys(s for s in scripts if s))
    return _PAGE.format(
        title=escape(f"{data['a']['platform']} and {data['b']['platform']}"),
        style=_core.page_style(),
        command=escape(script),
        body="\n".join(p for p in parts if p),
    )


def _answer(data: dict) -> str:
    counts = data["counts"]
    finite = data["parted"] is None and all(all(s["finite"].values()) for s in data["steps"])
    doubt = data["notes"] or not finite or any(counts[v] for v, tone in _TONES.items() if tone == "doubt")
    tone = "bad" if counts["defect"] else "doubt" if doubt else "good"
    figures = "".join(
        f'<div><dt>{escape(v)}</dt><dd>{n}</dd><dd class="note">{escape(_text.MEANS[v])}</dd></div>'
        for v, n in counts.items()
        if n
    )
    unpaired = "".join(f'<pre class="reason">{escape(line.strip())}</pre>' for line in _text.unpaired(data))
    notes = "".join(f'<pre class="reason">{escape(n)}</pre>' for n in data["notes"])
    return (
        f'<div class="answer {tone}">\n'
        f'<p class="name"><strong>a</strong> {escape(_text.about(data["a"]))}</p>\n'
        f'<p class="name"><strong>b</strong> {escape(_text.about(data["b"]))}</p>\n'
        f'<p class="headline">{escape(_text.headline(data))}</p>\n{notes}'
        f'<dl class="figures">{figures}</dl>\n{unpaired}</div>'
    )


def _finding(data: dict, f: dict) -> str:
    tone = _TONES[f["verdict"]]
    return f'<div class="answer {tone}">\n{_place(f)}{_finding_body(data, f)}\n</div>'


def _place(f: dict) -> str:
    return f'<p class="name"><strong>{escape(_text.short(f["op"]))}</strong> {escape(_text.at(f))}</p>\n'


def _finding_body(data: dict, f: dict) -> str:
    _, *lines = _text.finding(data, f)
    return f'<p class="lead">{escape(f["verdict"])}: {escape(_text.MEANS[f["verdict"]])}</p>' + _lines(lines)


def _lines(lines: Iterable[str]) -> str:
    return f'<pre class="reason">{escape(dedent(chr(10).join(lines)).strip())}</pre>'


def _steps(data: dict) -> str:
    rows = [
        [str(s["step"]), _text.number(s["loss_a"]), _text.number(s["loss_b"]), _text.mark(s)] for s in data["steps"]
    ]
    return _section("Losses", _table(["step", "a", "b", ""], rows)) if rows else ""


def _modules(data: dict) -> str:
    rows = [
        [m["name"], f"{m['relative']:.1e}", f"{m['largest']:.1e}", m["finding"] or ""]
        for m in _text.by_name(data["modules"])
    ]
    return _section("Modules", _table(["module", "difference", "largest element", ""], rows)) if rows else ""


def _gradients(data: dict) -> str:
    found = sorted(data["gradients"], key=lambda g: -g["relative"])
    rows = [[g["name"], f"{g['relative']:.1e}", f"{g['largest']:.1e}"] for g in found]
    return _section("Gradients", _table(["parameter", "difference", "largest element"], rows)) if rows else ""


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    def row(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "\n".join(row(r, "td") for r in rows[:_ROWS])
    more = f'<p class="more">and {len(rows) - _ROWS} more, in the JSON</p>' if len(rows) > _ROWS else ""
    return (
        f'<div class="wide"><table>\n<thead>{row(head, "th")}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>{more}'
    )
