//! What an audit says.

use std::ops::Range;

use serde::Serialize;

use crate::edit::Edit;
use crate::rule::{Rule, Severity};

/// A place in a file at which a rule strikes.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The rule's id.
    pub rule: &'static str,
    /// The rule's name.
    pub name: &'static str,
    /// The rule's severity.
    pub severity: Severity,
    /// As the file was named, with `/`.
    pub path: String,
    /// The cell of a notebook, from 1; lines are counted in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cell: Option<u32>,
    /// From 1.
    pub line: u32,
    /// In characters, from 1; behind 65536 bytes of a line in bytes.
    pub column: u32,
    /// From 1.
    pub end_line: u32,
    /// Behind the last character.
    pub end_column: u32,
    /// The reason.
    pub message: String,
    /// What to do.
    pub fix: &'static str,
    /// Whether oxitorch runs it as it is.
    pub unchanged: bool,
    /// Whether `--fix` mends it.
    pub fixable: bool,
    /// The line in the file.
    pub source: String,
    #[serde(skip)]
    pub(crate) edits: Vec<Edit>,
}

/// A rule that struck at some bytes of a text.
pub(crate) struct Struck {
    pub(crate) rule: &'static Rule,
    pub(crate) range: Range<usize>,
    /// What stands for `{}` in the rule's sentence.
    pub(crate) what: String,
    pub(crate) edits: Vec<Edit>,
}
