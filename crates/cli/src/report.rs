//! The lines of `oxitorch doctor` and how they are shown.

use std::fmt::Write;

use anstyle::{AnsiColor, Style};
use serde::Serialize;

/// How one check ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// As it should be.
    Ok,
    /// Works, with a catch.
    Warn,
    /// Keeps the device from working.
    Error,
}

impl Status {
    fn mark(self) -> (&'static str, Style) {
        match self {
            Status::Ok => ("✓", AnsiColor::Green.on_default()),
            Status::Warn => ("!", AnsiColor::Yellow.on_default().bold()),
            Status::Error => ("✗", AnsiColor::Red.on_default().bold()),
        }
    }
}

/// One line: what was looked at, how it is, what to do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Check {
    /// The heading it stands under.
    pub(crate) section: &'static str,
    /// What was looked at; stays the same from run to run, for programs that read the JSON.
    pub(crate) name: String,
    pub(crate) status: Status,
    /// What was found.
    pub(crate) found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
}

impl Check {
    fn new(section: &'static str, name: &str, status: Status, found: impl Into<String>) -> Check {
        Check { section, name: name.into(), status, found: found.into(), hint: None }
    }

    pub(crate) fn ok(section: &'static str, name: &str, found: impl Into<String>) -> Check {
        Check::new(section, name, Status::Ok, found)
    }

    pub(crate) fn warn(section: &'static str, name: &str, found: impl Into<String>) -> Check {
        Check::new(section, name, Status::Warn, found)
    }

    pub(crate) fn error(section: &'static str, name: &str, found: impl Into<String>) -> Check {
        Check::new(section, name, Status::Error, found)
    }

    pub(crate) fn hint(mut self, what: impl Into<String>) -> Check {
        self.hint = Some(what.into());
        self
    }
}

/// All lines.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) version: &'static str,
    pub(crate) status: Status,
    pub(crate) checks: Vec<Check>,
}

impl Report {
    pub(crate) fn new(checks: Vec<Check>) -> Report {
        let status = checks.iter().map(|c| c.status).max().unwrap_or(Status::Ok);
        Report { version: env!("CARGO_PKG_VERSION"), status, checks }
    }

    pub(crate) fn has_errors(&self) -> bool {
        self.status == Status::Error
    }

    pub(crate) fn json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// For people: sections with aligned names, a hint under each line that has one, a sum at the end.
    pub(crate) fn text(&self) -> String {
        let bold = Style::new().bold();
        let dim = Style::new().dimmed();
        let width = self.checks.iter().map(|c| c.name.chars().count()).max().unwrap_or(0);
        let mut out = format!("{bold}oxitorch {}{bold:#}\n", self.version);
        let mut section = "";
        for check in &self.checks {
            if check.section != section {
                section = check.section;
                let _ = writeln!(out, "\n{bold}{section}{bold:#}");
            }
            let (mark, style) = check.status.mark();
            let mut lines = check.found.lines();
            let first = lines.next().unwrap_or_default();
            let _ = writeln!(out, "  {style}{mark}{style:#} {:width$}  {first}", check.name);
            let indent = width + 6;
            for line in lines {
                let _ = writeln!(out, "{:indent$}{line}", "");
            }
            for line in check.hint.iter().flat_map(|h| h.lines()) {
                let _ = writeln!(out, "{:indent$}{dim}→ {line}{dim:#}", "");
            }
        }
        out + &self.sum()
    }

    fn sum(&self) -> String {
        let count = |s| self.checks.iter().filter(|c| c.status == s).count();
        let many = |n: usize, what| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let (warnings, errors) = (count(Status::Warn), count(Status::Error));
        let (_, style) = self.status.mark();
        match self.status {
            Status::Ok => format!("\n{style}Nothing to do.{style:#}\n"),
            Status::Warn => format!("\n{style}{}{style:#}: the device works.\n", many(warnings, "warning")),
            Status::Error if warnings == 0 => format!("\n{style}{}{style:#}\n", many(errors, "error")),
            Status::Error => {
                format!("\n{style}{}{style:#}, {}\n", many(errors, "error"), many(warnings, "warning"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_sections_hints_and_a_sum() {
        let report = Report::new(vec![
            Check::ok("Python", "torch", "2.15.0"),
            Check::warn("Python", "shim", "not built\nyet").hint("build it"),
            Check::error("Plugins", "cpu", "not found"),
        ]);
        let plain = anstream::adapter::strip_str(&report.text()).to_string();
        let expected = "\nPython\n  ✓ torch  2.15.0\n  ! shim   not built\n           yet\n           → build it\n\nPlugins\n  ✗ cpu    not found\n\n1 error, 1 warning\n";
        assert!(plain.ends_with(expected), "{plain}");
        assert!(report.has_errors());
    }
}
