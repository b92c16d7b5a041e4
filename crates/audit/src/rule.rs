//! What a rule is: one declaration, from which the findings, the pages and the tests come.

use serde::Serialize;

use crate::python::{Call, Hit, Model};
use ruff_python_ast::{Expr, Stmt};

/// How much a finding matters. An error is a line that has to change; a warning costs time or memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It runs well enough, and is worth to know.
    Note,
    /// It runs, and costs time, memory or compilations.
    Warning,
    /// It does not run on the device, or runs elsewhere without a word.
    Error,
}

impl Severity {
    /// As it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// Whether oxitorch runs the code as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Runs {
    /// It does; this Python, which uses the pattern on the device and asserts what comes out, is run by the tests.
    Unchanged(&'static str),
    /// It has to be changed.
    Change,
}

/// What one finding of a rule costs a programmer who does it for the first time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// Nothing to do, or nothing that must be done.
    None,
    /// A word or a line.
    Edit,
    /// Some lines, after a look at what they are for.
    Think,
    /// A part of the program is written anew.
    Rework,
    /// A kernel or a library is replaced.
    Port,
}

impl Effort {
    /// Hours of the first finding of a rule, and of each further one.
    pub fn hours(self) -> (f64, f64) {
        match self {
            Effort::None => (0.0, 0.0),
            Effort::Edit => (0.1, 0.02),
            Effort::Think => (0.5, 0.1),
            Effort::Rework => (4.0, 0.5),
            Effort::Port => (16.0, 4.0),
        }
    }
}

/// A rule.
#[derive(Clone, Copy)]
pub struct Rule {
    /// What it is selected by: the letters of its family and a number.
    pub id: &'static str,
    /// What it finds, in two or three words.
    pub name: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// The reason, in one sentence. `{}` is what stands in the source.
    pub sentence: &'static str,
    /// What to do.
    pub fix: &'static str,
    /// More than fits in a sentence, in Markdown.
    pub explanation: &'static str,
    /// Whether oxitorch runs it as it is.
    pub runs: Runs,
    /// What a finding costs.
    pub effort: Effort,
    /// Where it strikes.
    pub(crate) when: &'static [When],
    /// Where its names are meant as they are.
    pub(crate) unless: fn(&Model<'_>) -> bool,
    /// Code in which it finds something.
    pub bad: &'static [Example],
    /// Code in which it finds nothing.
    pub good: &'static [Example],
}

/// A file that shows what a rule finds.
#[derive(Clone, Copy, Debug)]
pub enum Example {
    /// A Python file.
    Py(&'static str),
    /// A file of another name, which says what it is.
    File(&'static str, &'static str),
}

impl Rule {
    /// The fields that most rules have alike.
    pub(crate) const BASE: Rule = Rule {
        id: "",
        name: "",
        severity: Severity::Warning,
        sentence: "",
        fix: "",
        explanation: "",
        runs: Runs::Change,
        effort: Effort::Think,
        when: &[],
        unless: |_| false,
        bad: &[],
        good: &[],
    };

    /// Whether oxitorch runs what it finds as it is.
    pub fn unchanged(&self) -> bool {
        matches!(self.runs, Runs::Unchanged(_))
    }
}

/// Rules on one subject.
pub struct Family {
    /// The letters that their ids begin with.
    pub prefix: &'static str,
    /// What it is called.
    pub name: &'static str,
    /// What they are about, in a sentence.
    pub about: &'static str,
    /// Its rules, by number.
    pub rules: &'static [Rule],
}

/// The rules of a family that stands in several files.
pub(crate) const fn joined<const COUNT: usize>(files: &[&[Rule]]) -> [Rule; COUNT] {
    let mut all = [Rule::BASE; COUNT];
    let (mut at, mut file) = (0, 0);
    // A constant is made without iterators.
    while file < files.len() {
        let mut i = 0;
        while i < files[file].len() {
            all[at] = files[file][i];
            (at, i) = (at + 1, i + 1);
        }
        file += 1;
    }
    assert!(at == COUNT, "a rule for each place");
    all
}

/// Where a rule strikes.
pub(crate) enum When {
    /// A qualified name is used or imported: exactly, or with `.*` all below it too. Reported where it is imported, or used
    /// in full.
    Name(&'static [&'static str]),
    /// A qualified name is called, and the function agrees.
    Call(&'static [&'static str], fn(&Call<'_, '_>) -> Option<Hit>),
    /// A method is called, whatever it is of, and the function agrees.
    Method(&'static [&'static str], fn(&Call<'_, '_>) -> Option<Hit>),
    /// An attribute is read, and the function agrees.
    Attribute(&'static [&'static str], fn(&Expr, &Model<'_>) -> Option<Hit>),
    /// A string literal.
    Text(fn(&str, &Expr, &Model<'_>) -> Option<Hit>),
    /// An expression whose truth is asked for.
    Truth(fn(&Expr, &Model<'_>) -> Option<Hit>),
    /// An index.
    Index(fn(&Expr, &Model<'_>) -> Option<Hit>),
    /// A keyword argument, by its name.
    Keyword(&'static [&'static str], fn(&Expr, &Call<'_, '_>) -> Option<Hit>),
    /// A statement.
    Statement(fn(&Stmt, &Model<'_>) -> Option<Hit>),
    /// A package in a list of requirements; `*` at its end takes all that begin so.
    Package(&'static [&'static str]),
    /// An environment variable, in Python, a shell script, YAML or a Dockerfile; `*` at its end takes all that begin so.
    Variable(&'static [&'static str]),
    /// A program or module that a shell script runs, or a command in YAML.
    Command(&'static [&'static str]),
    /// An argument of a command: `--fp16`, `backend=nccl`.
    Argument(fn(&str) -> bool),
    /// A key of YAML or JSON with a value.
    Setting(fn(&str, &str) -> bool),
    /// A line of C or C++ outside of comments.
    Line(fn(&str) -> bool),
    /// A file that is no Python.
    Unreadable,
}
