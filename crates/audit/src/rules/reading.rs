//! Files that cannot be read.

use crate::rule::{Effort, Example, Family, Rule, Runs, Severity, When};

pub(crate) static FAMILY: Family = Family {
    prefix: "REA",
    name: "reading",
    about: "Files that could not be read, in which nothing else was looked for.",
    rules: &[Rule {
        id: "REA001",
        name: "cannot be read",
        severity: Severity::Error,
        sentence: "This cannot be read, so nothing else was looked for in it: {}",
        fix: "Mend the syntax, or exclude the file; of a notebook the other cells were read.",
        explanation: "The parser reads Python 3. Files of Python 2, templates and broken notebooks end here, as do files that are not UTF-8 and files that nest so deeply that nobody wrote them.",
        runs: Runs::Change,
        effort: Effort::None,
        when: &[When::Unreadable],
        unless: |_| false,
        bad: &[
            Example::Py("import torch\nprint 'python 2'\n"),
            Example::Py("def f(:\n"),
            Example::File("a.ipynb", "{\"cells\": 3"),
        ],
        good: &[Example::Py("import torch\nprint('python 3')\n")],
    }],
};

/// The rule for files that cannot be read.
pub(crate) fn unreadable() -> &'static Rule {
    &FAMILY.rules[0]
}
