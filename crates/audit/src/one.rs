//! One file: from its text to its findings.

use std::path::Path;

use crate::finding::{Finding, Struck};
use crate::formats::{self, Format};
use crate::parallel::with_stack;
use crate::python::Elsewhere;
use crate::rule::Runs;
use crate::rules;
use crate::select::{Ignored, Settings};
use crate::source::Lines;
use crate::walk;

/// The findings in a text that stands in a file of this name; none, if the name is of no format.
pub fn findings(name: &str, text: &str, settings: &Settings) -> Vec<Finding> {
    let path = Path::new(name);
    let Some(format) = Format::of(path) else { return Vec::new() };
    let read = || of(path, name, format, text, settings, Elsewhere::default());
    // A short text cannot nest deeply.
    if text.len() < SHORT { read() } else { with_stack(read) }
}

/// Texts that need no stack of their own.
const SHORT: usize = 1000;

/// The findings in the text of a file.
pub(crate) fn of(
    path: &Path,
    name: &str,
    format: Format,
    text: &str,
    settings: &Settings,
    elsewhere: Elsewhere<'_>,
) -> Vec<Finding> {
    let elsewhere = Elsewhere { is_test: is_test(path), ..elsewhere };
    let mut out = match format {
        Format::Python => match walk::audit(text, false, elsewhere) {
            Ok(struck) => placed(name, text, format, settings, struck),
            Err(error) => placed(name, text, format, settings, vec![broken(error.at, error.why, text.len())]),
        },
        Format::Notebook => notebook(name, text, settings, elsewhere),
        _ => placed(name, text, format, settings, formats::audit(format, path, text)),
    };
    out.sort_by(|a, b| (a.cell, a.line, a.column, a.rule).cmp(&(b.cell, b.line, b.column, b.rule)));
    out.dedup_by(|a, b| (a.rule, a.cell, a.line, a.column) == (b.rule, b.cell, b.line, b.column));
    out
}

/// Whether a file is one of tests.
fn is_test(path: &Path) -> bool {
    let name = path.file_stem().and_then(|n| n.to_str()).unwrap_or_default();
    let folder = |f: &str| f == "tests" || f == "test";
    name.starts_with("test_")
        || name.ends_with("_test")
        || path.parent().is_some_and(|p| p.iter().filter_map(|f| f.to_str()).any(folder))
}

fn broken(at: usize, why: String, len: usize) -> Struck {
    let at = at.min(len);
    Struck { rule: rules::reading::unreadable(), range: at..at, what: why, edits: Vec::new() }
}

/// A file of which there is no text.
pub(crate) fn unreadable(name: &str, why: &str) -> Finding {
    let lines = Lines::new("");
    finding(name, &lines, broken(0, why.to_owned(), 0))
}

fn placed(name: &str, text: &str, format: Format, settings: &Settings, struck: Vec<Struck>) -> Vec<Finding> {
    if struck.is_empty() {
        return Vec::new();
    }
    let lines = Lines::new(text);
    let ignored = Ignored::of(text, format.comment());
    let taken = struck.into_iter().filter(|s| settings.takes(s.rule.id)).map(|s| finding(name, &lines, s));
    taken.filter(|f| !ignored.has(f, f.line, f.end_line)).collect()
}

fn finding(name: &str, lines: &Lines<'_>, struck: Struck) -> Finding {
    let rule = struck.rule;
    let (line, column) = lines.place(struck.range.start as u32);
    let (end_line, end_column) = lines.place(struck.range.end as u32);
    Finding {
        rule: rule.id,
        name: rule.name,
        severity: rule.severity,
        path: name.to_owned(),
        cell: None,
        line,
        column,
        end_line,
        end_column,
        message: rule.sentence.replace("{}", &short(&struck.what)),
        fix: rule.fix,
        unchanged: matches!(rule.runs, Runs::Unchanged(_)),
        fixable: !struck.edits.is_empty(),
        source: cut(lines.line(line)).to_owned(),
        edits: struck.edits,
    }
}

/// As much of a line as is kept.
fn cut(line: &str) -> &str {
    const MOST: usize = 400;
    line.char_indices().nth(MOST).map_or(line, |(end, _)| &line[..end])
}

/// One line, and not a long one.
fn short(what: &str) -> String {
    const MOST: usize = 70;
    let words = what.split_whitespace().collect::<Vec<_>>().join(" ");
    match words.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &words[..end]),
        None => words,
    }
}

/// A notebook's cells are read as one text; one that is no Python is reported, and left out.
fn notebook(name: &str, json: &str, settings: &Settings, elsewhere: Elsewhere<'_>) -> Vec<Finding> {
    let mut cells = match formats::cells(json) {
        Ok(cells) => cells,
        Err(why) => return placed(name, json, Format::Notebook, settings, vec![broken(0, why, json.len())]),
    };
    let mut struck = Vec::new();
    // Each round that fails leaves out one cell.
    for _ in 0..=cells.len().min(MOST_BROKEN) {
        match walk::audit(&cells.text, true, elsewhere) {
            Ok(found) => {
                struck.extend(found);
                break;
            }
            Err(error) => {
                struck.push(broken(error.at, error.why, cells.text.len()));
                cells.blank(error.at);
            }
        }
    }
    struck.iter_mut().for_each(|s| s.edits.clear());
    let lines = Lines::new(&cells.text);
    let ranges: Vec<usize> = struck.iter().map(|s| s.range.start).collect();
    let ignored = Ignored::of(&cells.text, "#");
    let mut out = Vec::new();
    for (start, s) in ranges.into_iter().zip(struck) {
        if !settings.takes(s.rule.id) {
            continue;
        }
        let mut finding = finding(name, &lines, s);
        if ignored.has(&finding, finding.line, finding.end_line) {
            continue;
        }
        let (cell, begins) = cells.at(start);
        let before = lines.place(begins as u32).0 - 1;
        finding.cell = Some(cell);
        finding.line -= before;
        finding.end_line -= before;
        out.push(finding);
    }
    out
}

/// Cells that are left out before the rest of a notebook is not looked at.
const MOST_BROKEN: usize = 8;
