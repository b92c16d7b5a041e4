//! The report on the terminal.

use std::fmt::Write;
use std::time::Duration;

use anstyle::{AnsiColor, Style};

use oxitorch_format::{amount, bytes, cut, duration, many, short, usd};

use super::found;
use super::notes::{notes, why_new};
use super::sent;
use super::words::{mark, place, time};
use crate::Report;
use crate::answer::{Judged, Judgement, Kind};
use crate::hardware::{Work, bound, gpus};

impl Report {
    /// For the terminal.
    pub fn text(&self) -> String {
        let bold = Style::new().bold();
        let mut out = String::new();
        for slice in &self.slices {
            let _ = writeln!(out, "{bold}{}{bold:#}  {}", slice.slice, place(slice));
            out += &slice_text(slice, self.run_steps);
            out.push('\n');
        }
        if self.slices.len() > 1 {
            out += &table(&self.ranked());
        }
        let dim = Style::new().dimmed();
        let took = duration(Duration::from_secs_f64(self.elapsed_s));
        let effort = self.effort.words(&self.slices);
        let _ = writeln!(out, "{dim}{took}; {effort}{dim:#}");
        out
    }
}

fn slice_text(s: &Judged, run_steps: Option<u64>) -> String {
    let dim = Style::new().dimmed();
    let (sign, style, words) = mark(s.verdict);
    let mut out = format!("  {style}{sign} {words}{style:#}");
    if let (Some(need), Some(limit)) = (s.need_bytes, s.limit_bytes) {
        let share = 100.0 * need as f64 / limit as f64;
        let least = if s.need_is_least { "at least " } else { "" };
        let _ = write!(out, ": {least}{} of {} ({share:.1} %)", bytes(need), bytes(limit));
    }
    out.push('\n');
    if let Some(why) = s.reason.as_ref().filter(|w| !w.is_empty()) {
        why.lines().for_each(|l| _ = writeln!(out, "    {l}"));
    }
    for note in s.parallel.iter().flat_map(|p| &p.notes) {
        let _ = writeln!(out, "    {note}");
    }
    if s.verdict.status() == 0 && s.platform != "cpu" {
        let _ = writeln!(out, "    {dim}what the run time keeps for itself on a chip is not in this{dim:#}");
    }
    if let Some(share) = s.topology.as_deref().and_then(gpus::share) {
        let _ = writeln!(out, "    {dim}{share}{dim:#}");
    }
    out += &found::budget(&s.budget);
    out += &s.fit.as_ref().map_or(String::new(), found::fit);
    out += &s.remat.as_ref().map_or(String::new(), found::remat);
    out += &largest(s);
    out += &found::advice(s);
    out += &step(s);
    out += &sent::by_line(s);
    out += &notes(s, run_steps);
    out += &programs(&s.programs);
    out += &host(s);
    out
}

/// Tensors that are listed.
const SHOWN: usize = 8;

/// The memory of the program that needs most.
fn largest(s: &Judged) -> String {
    let Some(p) = s.programs.iter().max_by_key(|p| p.need_bytes) else { return String::new() };
    let Some(m) = p.memory_bytes else { return String::new() };
    let bold = Style::new().bold();
    let mut out = format!("\n  {bold}memory of one chip{bold:#} while {} runs\n", p.name);
    let code: u64 = p.need_bytes.unwrap_or(0).saturating_sub(p.beside_bytes + m.peak);
    let rows = [
        ("arguments", m.arguments, ""),
        ("outputs", m.outputs, ""),
        ("aliased", m.aliased, "outputs in the memory of arguments"),
        ("temporaries", m.temporaries, ""),
        ("on the host", m.host, "in the memory of the host"),
        ("peak", m.peak, "of those together"),
        ("besides", p.beside_bytes, "other tensors that are alive then"),
        ("programs", code, "the machine code of all programs"),
    ];
    // A compiler for GPUs does not say how large its code is.
    for (name, n, what) in
        rows.into_iter().filter(|(name, n, _)| *n > 0 || !matches!(*name, "programs" | "on the host"))
    {
        let line = format!("    {:>10}  {name:12} {what}", bytes(n));
        let _ = writeln!(out, "{}", line.trim_end());
    }
    if !p.buffers_at_peak.is_empty() {
        return out + &found::buffers(p);
    }
    let _ = writeln!(out, "\n  {bold}its largest arguments and outputs{bold:#}");
    for t in p.tensors.iter().take(SHOWN) {
        let line = t.line.as_deref().map_or("an unknown line", short);
        let op = t.op.as_ref().map_or(String::new(), |o| format!(" {o}"));
        let given = if t.overwritten { ", overwritten" } else { "" };
        let op = t.split.as_ref().map_or(op.clone(), |s| format!("{op}, split [{s}]"));
        let _ = writeln!(out, "    {:>10}  {:8} {}, {line}{op}{given}", bytes(t.bytes), t.role, t.r#type);
    }
    out
}

fn step(s: &Judged) -> String {
    let Some(step) = &s.step else { return String::new() };
    let bold = Style::new().bold();
    let mut out = format!("\n  {bold}a step{bold:#}\n");
    let Work { product_flops, bytes_accessed, intensity, .. } = step.work;
    let launches = many(step.launches, "launch").replace("launchs", "launches");
    let _ = writeln!(out, "    {launches} of {}", many(step.programs, "program"));
    if bytes_accessed > 0.0 {
        let (all, products) = (amount(step.work.operations()), amount(product_flops));
        let _ = writeln!(out, "    {all}FLOP, of which {products}FLOP in products and convolutions");
        let moved = bytes(bytes_accessed as u64);
        let _ = writeln!(out, "    {moved} to and from memory, {intensity:.1} FLOP per byte");
    }
    if let (Some(t), Some(mxu), Some(hbm)) = (step.work.roofline_s, step.work.mxu_s, step.work.hbm_s) {
        let bound = bound(step.work.bound.unwrap_or_default(), s.platform);
        let links = step.work.ici_s.map_or(String::new(), |s| format!(", links {}", time(s)));
        let (mxu, hbm) = (time(mxu), time(hbm));
        let _ =
            writeln!(out, "    at least {}: bound by {bound} (products {mxu}, memory {hbm}{links})", time(t));
    }
    for Kind { kind, total } in &step.collectives {
        let least = total.ici_s.map_or(String::new(), |s| format!(", at least {}", time(s)));
        let _ = writeln!(out, "    {} x {kind}, {} a chip{least}", total.count, bytes(total.bytes));
    }
    if let Some(most) = step.without_overlap_s {
        let _ = writeln!(out, "    at least {} where nothing is computed while processes send", time(most));
    }
    if let Some(share) = step.work.mfu_ceiling {
        let _ = writeln!(out, "    at most {:.1} % of the chip's bfloat16 peak", 100.0 * share);
    }
    out
}

/// Programs that are listed.
const LISTED: usize = 20;

fn programs(all: &[Judgement]) -> String {
    let (bold, dim, name) = (Style::new().bold(), Style::new().dimmed(), AnsiColor::Cyan.on_default());
    let mut out = format!(
        "\n  {bold}{:8}  {:>5}  {:>8}  {:>10}  {:>10}  {:>9}  {:>7}  program{bold:#}\n",
        "id", "ops", "launches", "memory", "temporary", "at least", "compile"
    );
    for p in all.iter().take(LISTED) {
        let (_, style, _) = mark(p.verdict);
        let least = p.work.as_ref().and_then(|w| w.roofline_s).map_or_else(|| "-".to_owned(), time);
        let need = p.need_bytes.map_or_else(|| "-".to_owned(), bytes);
        let temporaries = p.memory_bytes.map_or_else(|| "-".to_owned(), |m| bytes(m.temporaries));
        let compile = duration(Duration::from_secs_f64(p.compile_s));
        let line = p.first_line.as_deref().map_or("", short);
        let _ = writeln!(
            out,
            "  {style}{:8}{style:#}  {:>5}  {:>8}  {need:>10}  {temporaries:>10}  {least:>9}  {compile:>7}  {name}{}{name:#} {dim}{line}{dim:#}",
            cut(&p.id, 8).trim_end_matches('.'),
            p.ops,
            p.launches,
            p.name,
        );
        if let Some(why) = p.why.as_ref().filter(|w| w.nearest.is_some()) {
            let _ = writeln!(out, "            {dim}{}{dim:#}", cut(&why_new(why), 100));
        }
        if let Some(fast) = p.fast_need_bytes {
            let _ = writeln!(out, "            {dim}{} with little effort{dim:#}", bytes(fast));
        }
    }
    if all.len() > LISTED {
        let _ = writeln!(out, "  and {} more", all.len() - LISTED);
    }
    out
}

/// What goes between host and device in the last step, and what the CPU did.
fn host(s: &Judged) -> String {
    let bold = Style::new().bold();
    let reads: u64 = s.host_reads.iter().map(|m| m.count).sum();
    let mut out = format!("\n  {bold}{}{bold:#} in the last step\n", many(reads, "host read"));
    for m in &s.host_reads {
        let line = m.line.as_deref().unwrap_or("an unknown line");
        let _ = writeln!(out, "    {:>4} x  {}, {}", m.count, short(line), bytes(m.bytes));
    }
    if !s.fallbacks.is_empty() {
        let _ = writeln!(out, "  {bold}operations that ran on the CPU{bold:#}, in all steps");
    }
    for f in &s.fallbacks {
        let line = f.line.as_deref().unwrap_or("an unknown line");
        let _ = writeln!(out, "    {:>4} x  {} {}", f.count, f.op, short(line));
    }
    out
}

/// Several slices side by side, the cheapest that fits first.
fn table(slices: &[&Judged]) -> String {
    let bold = Style::new().bold();
    let mut out = format!(
        "{bold}{:14}  {:>10}  {:>10}  {:>9}  {:>13}  {:>9}{bold:#}\n",
        "slice", "memory", "limit", "at least", "a step", "an hour"
    );
    for s in slices {
        let size = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), bytes);
        let least = s.least_s().map_or_else(|| "-".to_owned(), time);
        let (_, style, words) = mark(s.verdict);
        let (need, limit) = (size(s.need_bytes), size(s.limit_bytes));
        let dollars = |x: Option<f64>| x.map_or_else(|| "-".to_owned(), usd);
        let step = dollars(s.price.as_ref().and_then(|p| p.usd_per_step));
        let hour = dollars(s.price.as_ref().map(|p| p.usd_per_hour));
        let _ = writeln!(
            out,
            "{:14}  {need:>10}  {limit:>10}  {least:>9}  {step:>13}  {hour:>9}  {style}{words}{style:#}",
            s.slice
        );
    }
    out.push('\n');
    out
}
