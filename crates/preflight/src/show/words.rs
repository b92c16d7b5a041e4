//! Words that parts of the reports share.

use anstyle::{AnsiColor, Style};

use crate::answer::Judged;
use crate::verdict::Verdict;

/// The device of a slice, and how much of the slice a step uses.
pub(super) fn place(s: &Judged) -> String {
    let topology = s.topology.as_ref().map_or(String::new(), |t| format!(", topology {t}"));
    let chips = match s.chips {
        1 => "1 chip".to_owned(),
        n if s.processes.is_some() => {
            let all = s.processes.as_ref().map_or(1, |p| p.count);
            format!("{} of {n} chips, {}: all is said of the first", s.chips_used, many_processes(all))
        }
        n => match &s.parallel {
            Some(told) => format!("{n} chips, {}", told.words()),
            None => {
                format!("{} of {n} chips: the script uses one device (--parallel splits it)", s.chips_used)
            }
        },
    };
    format!("{}{topology}, {chips}", s.device)
}

pub(super) fn many_processes(n: u64) -> String {
    if n == 1 { "1 process".to_owned() } else { format!("{n} processes") }
}

/// A sign, its style, and the words.
pub(super) fn mark(verdict: Verdict) -> (&'static str, Style, &'static str) {
    let (sign, style) = match verdict {
        Verdict::Fits => ("✓", AnsiColor::Green.on_default().bold()),
        Verdict::FitsBarely => ("!", AnsiColor::Yellow.on_default().bold()),
        Verdict::DoesNotFit => ("✗", AnsiColor::Red.on_default().bold()),
        Verdict::Unknown => ("?", AnsiColor::Yellow.on_default().bold()),
    };
    (sign, style, verdict.words())
}

/// Seconds, as they are printed.
pub(super) fn time(s: f64) -> String {
    // A sum of nothing is -0.
    match s + 0.0 {
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}
