//! For the terminal: what was looked for and found, what makes a step smaller, where its memory is.

use std::fmt::Write;

use anstyle::{AnsiColor, Style};
use oxitorch_format::{bytes, many, short};

use super::words::{mark, time};
use crate::answer::{Advice, Compiled, FitTry, Fitted, Held, Judged, Judgement, Rematted};
use crate::judge::budget::counted;
use crate::memory::Buffer;
use crate::record::Policy;

/// For the terminal.
pub(super) fn budget(held: &[Held]) -> String {
    if held.is_empty() {
        return String::new();
    }
    let bold = Style::new().bold();
    let mut out = format!("\n  {bold}budget{bold:#}\n");
    for h in held {
        let (sign, style) = match h.ok {
            Some(true) => ("✓", AnsiColor::Green.on_default()),
            Some(false) => ("✗", AnsiColor::Red.on_default().bold()),
            None => ("?", AnsiColor::Yellow.on_default().bold()),
        };
        let number = |n: Option<f64>| match (h.name, n) {
            (_, None) => "not known".to_owned(),
            ("hbm", Some(n)) => bytes(n as u64),
            (_, Some(n)) => format!("{}", (n * 1e3).round() / 1e3),
        };
        let what = counted(h.name);
        let (value, limit) = (number(h.value), number(h.limit));
        let _ = writeln!(out, "    {style}{sign}{style:#} {:10} {value}, at most {limit}: {what}", h.name);
    }
    out
}

/// For the terminal.
pub(super) fn fit(found: &Fitted) -> String {
    let bold = Style::new().bold();
    let mut out = match (found.batch, found.confirmed) {
        (Some(n), true) => format!("\n  {bold}the largest batch that fits is {n}{bold:#}\n"),
        (Some(n), false) => {
            format!("\n  {bold}a batch of {n} fits{bold:#}; it was not found out which is the largest\n")
        }
        (None, true) => format!("\n  {bold}no batch fits{bold:#}\n"),
        (None, false) => format!("\n  {bold}no batch was found that fits{bold:#}\n"),
    };
    if let Some(why) = &found.reason {
        why.lines().for_each(|l| _ = writeln!(out, "    {l}"));
    }
    let _ = writeln!(
        out,
        "  {bold}{:>8}  {:>10}  {:>9}  {:>10}{bold:#}",
        "batch", "memory", "at least", "samples/s"
    );
    let mut tries: Vec<&FitTry> = found.tries.iter().collect();
    tries.sort_by_key(|t| t.batch);
    for t in tries {
        let (sign, style, words) = mark(t.verdict);
        let need = t.need_bytes.map_or_else(|| "-".to_owned(), bytes);
        let least = t.roofline_s.map_or_else(|| "-".to_owned(), time);
        let rate = t.samples_per_s.map_or_else(|| "-".to_owned(), |r| format!("{r:.1}"));
        let _ = writeln!(
            out,
            "  {:>8}  {need:>10}  {least:>9}  {rate:>10}  {style}{sign} {words}{style:#}",
            t.batch
        );
    }
    out
}

/// For the terminal.
pub(super) fn remat(found: &Rematted) -> String {
    let bold = Style::new().bold();
    let blocks = format!("{} ({})", many(found.blocks, "block"), found.classes.join(", "));
    let mut out = match found.policy {
        None => format!("\n  {bold}it does not fit with checkpoints either{bold:#}, of {blocks}\n"),
        Some(Policy::None) => format!("\n  {bold}it fits without checkpoints{bold:#} of {blocks}\n"),
        Some(p) => format!("\n  {bold}it fits with checkpoints of {}{bold:#}, of {blocks}\n", p.words()),
    };
    let _ = found.code.map(|c| writeln!(out, "    {c}"));
    let _ = writeln!(
        out,
        "  {bold}{:26}  {:>10}  {:>8}  {:>9}{bold:#}",
        "checkpoints of", "memory", "FLOPs", "at least"
    );
    for t in &found.tries {
        let (sign, style, words) = mark(t.verdict);
        let need = t.need_bytes.map_or_else(|| "-".to_owned(), bytes);
        let added = t.added.map_or_else(|| "-".to_owned(), |a| format!("{:+.1} %", 100.0 * a));
        let least = t.roofline_s.map_or_else(|| "-".to_owned(), time);
        let name = t.policy.words();
        let _ =
            writeln!(out, "  {name:26}  {need:>10}  {added:>8}  {least:>9}  {style}{sign} {words}{style:#}");
    }
    out
}

/// Where the numbers are from.
pub(super) fn source(p: &Judgement) -> &'static str {
    let compiled = p.advice.iter().filter(|a| a.compiled.is_some()).count();
    match compiled {
        0 => "estimates: nothing was compiled for them",
        n if n == p.advice.len() => "compiled with little effort",
        _ => "estimates, but for those that were compiled, with little effort",
    }
}

/// What to do, and what came of it.
pub(super) fn whole(advice: &Advice) -> String {
    let then = |c: &Compiled| {
        let notes: String = c.notes.iter().map(|n| format!("; {n}")).collect();
        format!(" (compiled: then {}, {}{notes})", bytes(c.need_bytes), c.verdict.words())
    };
    advice.text.clone() + &advice.compiled.as_ref().map_or_else(String::new, then)
}

/// What to do, for the terminal.
pub(super) fn advice(s: &Judged) -> String {
    let Some(p) = s.needed() else { return String::new() };
    let (bold, dim) = (Style::new().bold(), Style::new().dimmed());
    let mut out = format!("\n  {bold}what makes it smaller{bold:#} {dim}({}){dim:#}\n", source(p));
    for a in &p.advice {
        let _ = writeln!(out, "    {:>10}  {}", bytes(a.bytes), whole(a));
        for (line, n) in &a.lines {
            let _ = writeln!(out, "                {dim}{} in {}{dim:#}", bytes(*n), short(line));
        }
    }
    out
}

/// Buffers that are listed.
const SHOWN: usize = 8;

fn buffer(b: &Buffer) -> String {
    let mut out = format!("{:>10}  {:9} {}", bytes(b.bytes), b.role, b.r#type);
    if b.bytes > b.unpadded_bytes + b.unpadded_bytes / 10 {
        let _ = write!(out, " padded from {}", bytes(b.unpadded_bytes));
    }
    if let Some(name) = &b.name {
        let _ = write!(out, ", {name}");
    }
    let line = b.line.as_deref().map_or("an unknown line", short);
    let _ = write!(out, ", {line}");
    if let Some(op) = &b.op {
        let _ = write!(out, " {op}");
    }
    let notes =
        [(b.backward, "backward"), (b.activation, "kept for the backward"), (b.overwritten, "overwritten")];
    for (_, note) in notes.iter().filter(|(is, _)| *is) {
        let _ = write!(out, ", {note}");
    }
    out
}

/// The largest of a program, for the terminal.
pub(super) fn buffers(p: &Judgement) -> String {
    let bold = Style::new().bold();
    let mut out = format!("\n  {bold}its largest buffers when it needs most{bold:#}\n");
    for b in p.buffers_at_peak.iter().take(SHOWN) {
        let _ = writeln!(out, "    {}", buffer(b));
    }
    let rest: u64 = p.buffers_at_peak.iter().skip(SHOWN).map(|b| b.bytes).sum();
    let _ = writeln!(out, "    {:>10}  all others, and gaps", bytes(rest + p.buffers_rest_bytes));
    out
}
