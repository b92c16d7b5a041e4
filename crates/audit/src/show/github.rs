//! Findings as annotations of GitHub's workflows.

use std::fmt::Write;

use crate::report::Report;
use crate::rule::Severity;

/// A line for each finding.
pub fn github(report: &Report) -> String {
    let mut out = String::new();
    for f in &report.findings {
        let command = match f.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "notice",
        };
        let _ = writeln!(
            out,
            "::{command} file={},line={},endLine={},col={},title={}::{}",
            property(&f.path),
            f.line,
            f.end_line,
            f.column,
            property(&format!("{} {}", f.rule, f.name)),
            data(&format!("{} {}", f.message, f.fix))
        );
    }
    out
}

fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_a_meaning_is_escaped() {
        assert_eq!((property("a:b,c%"), data("a:b\n")), ("a%3Ab%2Cc%25".to_owned(), "a:b%0A".to_owned()));
    }
}
