"""The pages that people read: each link leads somewhere, each page is on the site, and blocks of Python run.

A page's blocks run in its order, in one process, on the cpu platform. Beside them there are two comments, which readers
of the page do not see: one that starts with `python` holds code that runs where it stands, such as the model of which a
block speaks, and `not run: REASON` stands before a block that cannot run here.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += sorted((REPO / "docs").glob("**/*.md"))
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
# A comment before a block, the language of a block, its text; or a comment that is code itself.
CODE = re.compile(
    r"(?:^<!-- not run:(?P<reason>[^\n]*)-->\n+)?^```python\n(?P<block>.*?)^```$|^<!-- python\n(?P<hidden>.*?)^-->$",
    re.M | re.S,
)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^\[[^\]]+\]:\s+(\S+)|(?:href|src)=\"([^\"]+)\"", re.M)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.M)


def name_of(page: Path) -> str:
    return str(page.relative_to(REPO))


def anchors(text: str) -> set[str]:
    """The anchors of headings, as hosts of Markdown name them; the builder of the site agrees, or it says so."""
    found: list[str] = []
    for heading in HEADING.findall(FENCED.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-")
        again = sum(f == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", f) is not None for f in found)
        found.append(f"{slug}-{again}" if again else slug)
    return set(found)


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    bad = []
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    for link in (next(filter(None, groups)) for groups in LINK.findall(prose)):
        target = urlsplit(link)
        if target.scheme:
            if target.scheme != "https" or not target.netloc:
                bad.append(link)
            continue
        file = (page.parent / target.path).resolve() if target.path else page
        if not file.exists() or (target.fragment and target.fragment not in anchors(file.read_text())):
            bad.append(link)
    return bad


def program(text: str) -> str:
    """The Python of a page, each line where it stands on the page, so that a traceback names the page's lines."""
    lines = [""] * (text.count("\n") + 1)
    for code in CODE.finditer(text):
        if code["reason"] is None:
            part = "block" if code["block"] is not None else "hidden"
            first = text.count("\n", 0, code.start(part))
            own = code[part].splitlines()
            lines[first : first + len(own)] = own
    return "\n".join(lines)


WITH_PYTHON = [p for p in PAGES if "```python" in p.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = page.read_text()
    assert broken(page, text) == []
    # What the site is built of has no links out of its folder.
    assert page.parent == REPO or "](../" not in text


def test_each_page_is_in_the_navigation():
    site = yaml.safe_load((REPO / "mkdocs.yml").read_text())

    def files(nav):
        for entry in nav:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else files(value)

    listed = list(files(site["nav"]))
    docs = REPO / site["docs_dir"]
    assert sorted(listed) == sorted(str(p.relative_to(docs)) for p in docs.glob("**/*.md"))
    # Who reads the sources finds them too, or the page that lists them.
    readme = (REPO / "README.md").read_text()
    unknown = [
        p for p in listed if p != "index.md" and f"(docs/{p})" not in readme and not p.startswith(("ops-", "audit/"))
    ]
    assert unknown == [], "name them in README.md"


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_runs(page, python, tmp_path):
    text = page.read_text()
    code = list(CODE.finditer(text))
    blocks = [c for c in code if c["block"] is not None]
    assert len(blocks) == len(re.findall(r"```\s*py", text)), "a block that is not found: is it indented?"
    assert text.count("not run:") == sum(c["reason"] is not None for c in code), "a mark that no block follows"
    assert all(c["reason"] is None or len(c["reason"].split()) > 2 for c in code), "a mark without a reason"
    # On the line of the page's title there is no code. Pages speak of `torch` without importing it each time.
    start = f"import os, torch; os.chdir({str(tmp_path)!r})"
    python(start + program(text), OXITORCH_PLATFORM="cpu")


def test_what_is_wrong_is_found(tmp_path):
    page = tmp_path / "page.md"
    text = (
        "# A `title`, twice\n# A title, twice\n```\n# none\n[no](link)\n```\n"
        "[a](#a-title-twice-1) [b](#a-title-twice-2) [c](none.md) [d](page.md#none) [e](http://x.y) `[f](g)`\n"
    )
    page.write_text(text)
    assert anchors(text) == {"a-title-twice", "a-title-twice-1"}
    assert broken(page, text) == ["#a-title-twice-2", "none.md", "page.md#none", "http://x.y"]
    text = "# t\n```python\na = 1\n```\n<!-- not run: needs a TPU -->\n```python\nb\n```\n<!-- python\nc = a\n-->\n"
    assert program(text).splitlines() == ["", "", "a = 1", "", "", "", "", "", "", "c = a", ""]
