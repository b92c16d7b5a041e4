//! Findings as a compiler shows them: the line, a mark below it, the reason, the fix; and a sum at the end.

use std::fmt::Write;

use anstyle::{AnsiColor, Style};

use crate::effort::HOW;
use crate::finding::Finding;
use crate::report::Report;
use crate::rule::Severity;
use crate::rules::by_id;

const BLUE: Style = AnsiColor::Blue.on_default().bold();
const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();

fn colour(severity: Severity) -> Style {
    match severity {
        Severity::Error => AnsiColor::Red.on_default().bold(),
        Severity::Warning => AnsiColor::Yellow.on_default().bold(),
        Severity::Note => AnsiColor::Cyan.on_default().bold(),
    }
}

/// The report with colours, which the caller takes away where there is no terminal.
pub fn text(report: &Report, findings: bool) -> String {
    let mut out = String::new();
    for finding in report.findings.iter().filter(|_| findings) {
        one(&mut out, finding);
    }
    out + &sum(report)
}

fn one(out: &mut String, f: &Finding) {
    let style = colour(f.severity);
    let _ = writeln!(out, "{style}{}[{}]{style:#}{BOLD}: {}{BOLD:#}", f.severity.name(), f.rule, f.message);
    let number = f.line.to_string();
    let width = number.len();
    let cell = f.cell.map_or(String::new(), |c| format!(" (cell {c})"));
    let _ = writeln!(out, "{:width$}{BLUE}-->{BLUE:#} {}:{}:{}{cell}", "", f.path, f.line, f.column);
    if !f.source.trim().is_empty() {
        let (line, from, to) = cut(f);
        let mark = "^".repeat((to - from).max(1));
        let _ = writeln!(out, "{:width$} {BLUE}|{BLUE:#}", "");
        let _ = writeln!(out, "{BLUE}{number} |{BLUE:#} {line}");
        let _ = writeln!(out, "{:width$} {BLUE}|{BLUE:#} {:from$}{style}{mark}{style:#}", "", "");
    }
    let runs = if f.unchanged { "runs unchanged" } else { "has to be changed" };
    let mended = if f.fixable { ", --fix does it" } else { "" };
    let _ = writeln!(out, "{:width$} {BLUE}={BLUE:#} fix: {} {DIM}({runs}{mended}){DIM:#}\n", "", f.fix);
}

/// At most so many characters of a line are shown.
const MOST: usize = 160;

/// The part of the line that is shown, without tabs, and where the mark is in it.
fn cut(f: &Finding) -> (String, usize, usize) {
    let chars: Vec<char> = f.source.chars().map(|c| if c == '\t' { ' ' } else { c }).collect();
    let from = (f.column as usize - 1).min(chars.len());
    let to = if f.end_line == f.line { (f.end_column as usize - 1).min(chars.len()) } else { chars.len() };
    let begin = if to > MOST { from.min(to - 1).saturating_sub(20) } else { 0 };
    let end = (begin + MOST).min(chars.len());
    let shown = chars[begin..end].iter().collect::<String>();
    (shown.trim_end().to_owned(), from - begin, to.min(end).max(from) - begin)
}

fn sum(report: &Report) -> String {
    let mut out = String::new();
    let speed = report.lines as f64 / report.elapsed_s.max(1e-9);
    let read = format!(
        "{} files, {} lines in {:.2} s ({} lines a second)",
        report.files, report.lines, report.elapsed_s, speed as u64
    );
    if report.findings.is_empty() {
        let _ = writeln!(out, "{BOLD}Nothing found.{BOLD:#} {DIM}{read}{DIM:#}");
        return out;
    }
    let unchanged = report.findings.iter().filter(|f| f.unchanged).count();
    let fixable = report.findings.iter().filter(|f| f.fixable).count();
    let all = report.findings.len();
    let change = all - unchanged;
    let _ = writeln!(
        out,
        "{BOLD}{all} findings{BOLD:#}: {unchanged} run{} unchanged, {change} ha{} to be changed, of which --fix does {fixable}",
        if unchanged == 1 { "s" } else { "" },
        if change == 1 { "s" } else { "ve" },
    );
    let _ = writeln!(out, "{DIM}{read}{DIM:#}\n");
    let _ = writeln!(
        out,
        "{BOLD}{:14} {:>7} {:>9} {:>6} {:>8} {:>12} {:>13}{BOLD:#}",
        "", "errors", "warnings", "notes", "fixable", "days needed", "days advised"
    );
    for p in &report.estimate.families {
        let _ = writeln!(
            out,
            "{:14} {:>7} {:>9} {:>6} {:>8} {:>12.1} {:>13.1}",
            p.family, p.errors, p.warnings, p.notes, p.fixable, p.needed_days, p.advised_days
        );
    }
    let e = &report.estimate;
    let _ = writeln!(
        out,
        "{BOLD}{:14} {:>7} {:>9} {:>6} {:>8} {:>12.1} {:>13.1}{BOLD:#}",
        "together",
        report.count(Severity::Error),
        report.count(Severity::Warning),
        report.count(Severity::Note),
        fixable,
        e.needed_days,
        e.advised_days
    );
    let _ = writeln!(out, "{DIM}{HOW}{DIM:#}");
    let mut rules: Vec<&str> = report.findings.iter().map(|f| f.rule).collect();
    rules.sort_unstable();
    rules.dedup();
    let first = rules.first().and_then(|r| by_id(r)).map_or("", |r| r.id);
    let _ = writeln!(out, "{DIM}`oxitorch audit --explain {first}` says more about a rule.{DIM:#}");
    out
}
