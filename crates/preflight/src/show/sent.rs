//! What the processes of a script send each other, by the Python line that asks for it.

use std::fmt::Write;

use anstyle::Style;
use oxitorch_format::{bytes, many, short};

use super::words::{many_processes, time};
use crate::answer::{Called, Judged, Processes};

/// Lines, and collectives of each, that are listed.
const SHOWN: usize = 8;

/// For the terminal.
pub(super) fn by_line(s: &Judged) -> String {
    let Some(processes) = s.processes.as_ref().filter(|p| !p.lines.is_empty()) else { return String::new() };
    let bold = Style::new().bold();
    let count: u64 = processes.lines.iter().map(|l| l.total.count).sum();
    let mut out = format!("\n  {bold}{}{bold:#} in the last step\n", many(count, "collective"));
    for l in processes.lines.iter().take(SHOWN) {
        let line = l.line.as_deref().map_or("an unknown line", short);
        let least = l.total.ici_s.map_or(String::new(), |s| format!(", at least {}", time(s)));
        let _ = writeln!(out, "    {:>4} x  {line}, {} a chip{least}", l.total.count, bytes(l.total.bytes));
        for text in asked(processes, &l.line) {
            let _ = writeln!(out, "            {text}");
        }
    }
    if processes.lines.len() > SHOWN {
        let _ = writeln!(out, "    and {}", many((processes.lines.len() - SHOWN) as u64, "more line"));
    }
    out
}

/// What a line asks for, those that are alike in a text.
pub(super) fn asked(processes: &Processes, line: &Option<String>) -> Vec<String> {
    let all: Vec<&Called> = processes.collectives.iter().filter(|c| c.line == *line).collect();
    let mut texts: Vec<String> = all.iter().take(SHOWN).map(|c| words(c)).collect();
    texts.extend((all.len() > SHOWN).then(|| format!("and {} more kinds", all.len() - SHOWN)));
    texts
}

/// For people: how often, what, of how much, among how many.
fn words(c: &Called) -> String {
    let (size, group) = (bytes(c.sent.bytes), many_processes(c.sent.devices));
    let when = if c.backward { ", backward" } else { "" };
    format!("{} x {} of {}, {size}, {group}{when}", c.sent.count, c.name, c.sent.operands)
}
