//! Lines about price, padding and inputs that are not overwritten, for the terminal.

use std::fmt::Write;

use anstyle::Style;

use oxitorch_capture::{Cause, Undonated, UndonatedReason, Why};
use oxitorch_format::{brief, bytes, many, short, usd};

use crate::answer::{Judged, Price};
use crate::memory::Padding;

/// Products that are named.
const NAMED: usize = 3;

/// Price, padding and what could have been overwritten.
pub(super) fn notes(s: &Judged, run_steps: Option<u64>) -> String {
    let mut out = price(s, run_steps);
    out += &s.padding.as_ref().map_or_else(String::new, padding);
    out + &undonated(s)
}

fn price(s: &Judged, run_steps: Option<u64>) -> String {
    let Some(price) = &s.price else {
        let chips = s.platform != "cpu";
        return if chips { "    no price known (--prices FILE)\n".to_owned() } else { String::new() };
    };
    let mut out = format!("    {}", per_step(price));
    if let (Some(run), Some(n)) = (price.usd_per_run, run_steps) {
        let _ = write!(out, ", {} for {}", usd(run), many(n, "step"));
    }
    let _ = writeln!(out, "; the slice costs {} an hour ({})", usd(price.usd_per_hour), source(price));
    out
}

fn per_step(price: &Price) -> String {
    price.usd_per_step.map_or_else(
        || "no time, so no price of a step".to_owned(),
        |x| format!("at least {} a step", usd(x)),
    )
}

/// Where a price comes from.
pub(super) fn source(price: &Price) -> String {
    let each = usd(price.usd_per_chip_hour);
    match (price.region, price.read) {
        (Some(region), Some(read)) => format!("{each} a chip on demand, {region}, read {read}"),
        _ => format!("{each} a chip, --prices"),
    }
}

fn padding(p: &Padding) -> String {
    let mut out = String::new();
    if p.share >= 0.005 {
        let _ = writeln!(
            out,
            "    about {:.0} % of the matrix unit's work is padding to its {} x {}",
            100.0 * p.share,
            p.unit,
            p.unit
        );
        for w in p.products.iter().filter(|w| w.useful < 0.995).take(NAMED) {
            let line = w.line.as_deref().map_or("an unknown line", short);
            let (op, useful) = (w.op.as_deref().unwrap_or("product"), 100.0 * w.useful);
            let _ = writeln!(out, "      {line} {op}: {useful:.0} % useful, {}", w.advice);
        }
    }
    if p.tensor_padded_bytes as f64 >= 1.05 * p.tensor_bytes as f64 {
        let (own, padded) = (bytes(p.tensor_bytes), bytes(p.tensor_padded_bytes));
        let _ = writeln!(out, "    arguments and outputs of {own} take {padded} in tiles of 8 x 128");
    }
    out
}

/// Inputs of the last step's programs that are not overwritten, if that is 1 % of what is needed.
fn undonated(s: &Judged) -> String {
    let all: Vec<&Undonated> = s.programs.iter().flat_map(|p| &p.undonated).collect();
    let sum: u64 = all.iter().map(|u| u.bytes).sum();
    let Some(need) = s.need_bytes.filter(|need| sum > 0 && sum >= need / 100) else { return String::new() };
    let dim = Style::new().dimmed();
    let (n, share) = (many(all.len() as u64, "input"), 100.0 * sum as f64 / need as f64);
    let mut out =
        format!("    {n} of {} that nobody uses again could not be overwritten ({share:.0} %)\n", bytes(sum));
    let mut all = all;
    all.sort_by_key(|u| std::cmp::Reverse(u.bytes));
    for u in all.iter().take(NAMED) {
        let line = u.line.as_deref().map_or("an unknown line", short);
        let _ = writeln!(out, "      {:>10}  {}, {line}: {dim}{}{dim:#}", bytes(u.bytes), u.r#type, why(u));
    }
    out
}

/// Why an input is not overwritten.
pub(super) fn why(u: &Undonated) -> &'static str {
    match u.reason {
        UndonatedReason::Held => {
            "a variable or the gradients' graph still holds it: del it, or let a function's end do so"
        }
        UndonatedReason::Size => "no result has its size",
    }
}

/// Why a program is a new one, in a line.
pub(super) fn why_new(w: &Why) -> String {
    match (w.nearest, w.differences.first()) {
        (Some(nearest), Some(first)) => format!("unlike program {nearest}: {}", brief(first)),
        (Some(nearest), None) => format!("unlike program {nearest}"),
        (None, _) if w.cause == Cause::First => "the first program".to_owned(),
        (None, _) => "these lines run for the first time".to_owned(),
    }
}
