"""What a comparison found, for people and for programs."""

import json

from oxitorch.diff import _html, _text
from oxitorch.diff._compare import EXPLAINED, VERDICTS


class Report:
    """The fields of the JSON that `docs/diff.md` lists, as `to_dict()` gives them, and what is asked for most."""

    def __init__(self, data: dict):
        self._data = data

    @property
    def ok(self) -> bool:
        """Whether all that differs is explained."""
        unexplained = [v for v in VERDICTS if v not in EXPLAINED]
        return not any(self._data["counts"][v] for v in unexplained) and not self._data["notes"]

    @property
    def status(self) -> int:
        """The exit status of the command: 0 all is explained, 1 not, 2 nothing could be compared."""
        return 2 if self._data["notes"] else int(not self.ok)

    @property
    def findings(self) -> list[dict]:
        """The operations whose differences are no rounding, in their order."""
        return self._data["findings"]

    @property
    def defects(self) -> list[dict]:
        """Those of them that are wrong for their own inputs."""
        return [f for f in self.findings if f["verdict"] == "defect"]

    @property
    def first(self) -> dict | None:
        """The first operation whose results differ at all."""
        return self._data["first"]

    def to_dict(self) -> dict:
        return json.loads(json.dumps(self._data))

    def to_json(self) -> str:
        return json.dumps(self._data, indent=2)

    def text(self) -> str:
        """What the command prints."""
        return _text.text(self._data)

    def html(self) -> str:
        """One page of HTML that loads nothing."""
        return _html.page(self._data)

    def __repr__(self) -> str:
        return f"<diff {self._data['a']['platform']} {self._data['b']['platform']}: {_text.headline(self._data)}>"

    __str__ = text
