//! How long the changes take: an estimate from the findings alone.

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::finding::Finding;
use crate::rule::Severity;
use crate::rules;

/// Hours of a working day.
const DAY: f64 = 8.0;

/// What a migration takes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    /// Working days for what must be changed.
    pub needed_days: f64,
    /// Working days for what costs time or memory.
    pub advised_days: f64,
    /// By families that have findings.
    pub families: Vec<Part>,
}

/// A family's part.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Part {
    /// Its name.
    pub family: &'static str,
    /// Findings by severity.
    pub errors: usize,
    /// The same.
    pub warnings: usize,
    /// The same.
    pub notes: usize,
    /// Findings that `--fix` mends.
    pub fixable: usize,
    /// Working days for its errors.
    pub needed_days: f64,
    /// Working days for its warnings.
    pub advised_days: f64,
}

/// How it is estimated, for people.
pub(crate) const HOW: &str = "Estimated for somebody who knows the code and does each thing for the first time: the first finding of a rule takes its hours, each further one a part of them, and what --fix mends takes nothing; a day is 8 hours. These hours are chosen, not measured.";

/// The estimate for findings: for each rule the hours of the first and of the others, without those that are mended.
pub(crate) fn estimate(findings: &[Finding]) -> Estimate {
    let mut by_rule: FxHashMap<&str, (usize, usize)> = FxHashMap::default();
    for finding in findings {
        let of = by_rule.entry(finding.rule).or_default();
        of.0 += 1;
        of.1 += usize::from(finding.fixable);
    }
    let mut estimate = Estimate::default();
    for family in rules::families() {
        let mut part = Part { family: family.name, ..Part::default() };
        for rule in family.rules {
            let Some((all, fixable)) = by_rule.get(rule.id) else { continue };
            let left = all - fixable;
            let (first, each) = rule.effort.hours();
            let days = if left == 0 { 0.0 } else { (first + each * (left - 1) as f64) / DAY };
            part.fixable += fixable;
            match rule.severity {
                Severity::Error => {
                    (part.errors, part.needed_days) = (part.errors + all, part.needed_days + days)
                }
                Severity::Warning => {
                    (part.warnings, part.advised_days) = (part.warnings + all, part.advised_days + days);
                }
                Severity::Note => part.notes += all,
            }
        }
        if part.errors + part.warnings + part.notes > 0 {
            estimate.needed_days += part.needed_days;
            estimate.advised_days += part.advised_days;
            estimate.families.push(part);
        }
    }
    estimate
}
