//! The report as one page of HTML: nothing is loaded, nothing runs, and it can be printed.
//!
//! A page is an answer for each slice and below it [`Section`]s (sections.rs); the crate `page` says how they look.

mod sections;

use std::time::Duration;

use oxitorch_format::{bytes, duration, many, usd};
use oxitorch_page::{Card, Cell, Figure, Page, Section, Table};

use super::words::{mark, place, time};
use crate::Report;
use crate::answer::Judged;
use crate::hardware::bound;
use crate::verdict::Verdict;

impl Report {
    /// As one page of HTML.
    ///
    /// # Errors
    ///
    /// If the page cannot be written, which is a defect.
    pub fn html(&self) -> anyhow::Result<String> {
        let ranked = self.ranked();
        let script = self.script.first().map_or("a script", |s| s.rsplit('/').next().unwrap_or(s));
        let page = Page {
            title: format!("Preflight of {script}"),
            command: self.script.join(" "),
            first: (ranked.len() > 1).then(|| self.compared(&ranked)).into_iter().collect(),
            cards: ranked.iter().map(|s| self.card(s)).collect(),
            notes: self.notes(),
        };
        Ok(page.html()?)
    }

    fn card(&self, s: &Judged) -> Card {
        Card {
            anchor: anchor(s),
            name: s.slice.clone(),
            place: place(s),
            tone: tone(s.verdict),
            mark: mark(s.verdict).0,
            headline: headline(s),
            reason: s.reason.clone().filter(|r| !r.is_empty()),
            figures: self.figures(s),
            sections: sections::of(s),
        }
    }

    fn figures(&self, s: &Judged) -> Vec<Figure> {
        let mut out = Vec::new();
        if let (Some(need), Some(limit)) = (s.need_bytes, s.limit_bytes) {
            let note = format!("of {} on a chip, {:.1} %", bytes(limit), 100.0 * need as f64 / limit as f64);
            out.push(Figure { label: "memory", value: bytes(need), note });
        }
        if let Some(least) = s.least_s() {
            let bound = s.step.as_ref().and_then(|t| t.work.bound).map_or("", |of| bound(of, s.platform));
            out.push(Figure {
                label: "a step takes at least",
                value: time(least),
                note: format!("bound by {bound}"),
            });
        }
        if let Some(share) = s.step.as_ref().and_then(|t| t.work.mfu_ceiling) {
            let note = "of the chip's bfloat16 peak (MFU)".to_owned();
            out.push(Figure { label: "it can use at most", value: format!("{:.1} %", 100.0 * share), note });
        }
        let Some(price) = &s.price else { return out };
        if let (Some(run), Some(n)) = (price.usd_per_run, self.run_steps) {
            let note = format!("for {}", many(n, "step"));
            out.push(Figure { label: "the run costs at least", value: usd(run), note });
        } else if let Some(step) = price.usd_per_step {
            let worth = |(_, n): &&(&str, f64)| n * step >= 0.01;
            let (label, n) = MANY.iter().find(worth).unwrap_or(&MANY[2]);
            out.push(Figure { label, value: usd(n * step), note: "if the chip is at its peaks".to_owned() });
        }
        let note = super::notes::source(price);
        out.push(Figure { label: "an hour of the slice", value: usd(price.usd_per_hour), note });
        out
    }

    fn compared(&self, slices: &[&Judged]) -> Section {
        let slowest = slices.iter().filter_map(|s| s.least_s()).fold(0.0, f64::max);
        let dearest = slices.iter().filter_map(|s| s.price.as_ref()?.usd_per_step).fold(0.0, f64::max);
        let of = |x: Option<f64>, most: f64, show: fn(f64) -> String| match x {
            Some(x) if most > 0.0 => Cell::number(show(x)).filled(x / most),
            Some(x) => Cell::number(show(x)),
            None => Cell { class: "number dim", ..Cell::text("not known") },
        };
        let rows = slices.iter().map(|s| {
            let name = Cell { link: Some(anchor(s)), ..Cell::text(s.slice.clone()) };
            let verdict = Cell {
                class: tone(s.verdict),
                ..Cell::text(format!("{} {}", mark(s.verdict).0, mark(s.verdict).2))
            };
            let memory = match (s.need_bytes, s.limit_bytes) {
                (Some(need), Some(limit)) => Cell::number(format!("{} of {}", bytes(need), bytes(limit)))
                    .filled(need as f64 / limit as f64),
                _ => Cell { class: "number dim", ..Cell::text("not known") },
            };
            let step = s.price.as_ref().and_then(|p| p.usd_per_step);
            let mut row = vec![name, verdict, memory, of(s.least_s(), slowest, time), of(step, dearest, usd)];
            if self.run_steps.is_some() {
                row.push(of(s.price.as_ref().and_then(|p| p.usd_per_run), 0.0, usd));
            }
            row.push(of(s.price.as_ref().map(|p| p.usd_per_hour), 0.0, usd));
            row
        });
        let run = self.run_steps.map(|n| format!("{} at least#", many(n, "step")));
        let mut head =
            vec!["slice", "", "memory of a chip#", "a step takes at least#", "a step costs at least#"];
        head.extend(run.as_deref());
        head.push("an hour#");
        let (title, lead) = ("Slices side by side".into(), "The cheapest that fits is first.".into());
        Section { title, lead, table: Some(Table::new(&head, rows)), ..Section::default() }
    }

    /// What stands at the end.
    fn notes(&self) -> Vec<String> {
        let effort = self.effort.words(&self.slices);
        let took = duration(Duration::from_secs_f64(self.elapsed_s));
        let steps = many(self.steps, "training step");
        vec![
            format!("The script ran without a device for {steps} and its programs were compiled for each slice, in {took}. Nothing was computed."),
            format!("Programs were {effort}."),
            "Times are a roofline: what products and the memory need at the chip's peaks. No run is quicker, and runs are slower; prices follow from it, so they are the least as well.".to_owned(),
            "What the run time of a chip keeps of its memory for itself is not known and not in these numbers; 5 % are kept for it.".to_owned(),
            format!("oxitorch {}", self.oxitorch),
        ]
    }
}

/// Steps that cost enough to be said.
const MANY: [(&str, f64); 3] = [
    ("a step costs at least", 1.0),
    ("1000 steps cost at least", 1e3),
    ("a million steps cost at least", 1e6),
];

/// Where a slice is on the page.
fn anchor(s: &Judged) -> String {
    format!("slice-{}", s.rank)
}

/// The colour of a verdict.
fn tone(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Fits => "good",
        Verdict::FitsBarely | Verdict::Unknown => "doubt",
        Verdict::DoesNotFit => "bad",
    }
}

/// The verdict in plain words.
fn headline(s: &Judged) -> String {
    let spare =
        s.need_bytes.zip(s.limit_bytes).map(|(need, limit)| 100.0 - 100.0 * need as f64 / limit as f64);
    match (s.verdict, s.need_bytes.zip(s.limit_bytes)) {
        (Verdict::Fits, _) => {
            format!(
                "It fits{}.",
                spare.map_or(String::new(), |s| format!(", with {s:.0} % of the memory to spare"))
            )
        }
        (Verdict::FitsBarely, _) => {
            "It fits with less than 5 % to spare, which the chip's run time may need: it may fail.".to_owned()
        }
        (Verdict::DoesNotFit, Some((need, limit))) => {
            format!("It does not fit: it needs at least {} and a chip has {}.", bytes(need), bytes(limit))
        }
        (Verdict::DoesNotFit, None) => "It does not fit.".to_owned(),
        (Verdict::Unknown, _) => "That could not be told.".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Slice;

    fn report(slices: Vec<Judged>) -> Report {
        let script = vec!["/home/me/<script>alert(1)</script>.py".to_owned(), "--a=\"&\"".to_owned()];
        let effort = crate::compile::Asked::Fast;
        let oxitorch = "0";
        Report { version: 1, oxitorch, script, steps: 3, run_steps: None, effort, elapsed_s: 1.0, slices }
    }

    fn judged(name: &str, verdict: Verdict) -> Judged {
        let judged = Judged::unknown(&Slice::parse(name).unwrap(), "<script>why</script>".to_owned());
        Judged { verdict, need_bytes: Some(3 << 30), limit_bytes: Some(4 << 30), ..judged }
    }

    #[test]
    fn what_users_wrote_is_text() {
        let page = report(vec![judged("v5e-1", Verdict::Unknown)]).html().unwrap();
        assert!(!page.contains("<script") && !page.contains("--a=\"&\""));
        assert!(page.contains("alert(1)") && page.contains("why"));
    }

    #[test]
    fn a_page_loads_nothing() {
        let page = report(vec![judged("v5e-1", Verdict::Fits)]).html().unwrap();
        for word in ["http:", "https:", "src=", "@import", "url(", "<link"] {
            assert!(!page.contains(word), "{word}");
        }
    }

    #[test]
    fn the_verdict_is_said_in_plain_words() {
        for (verdict, words) in [
            (Verdict::Fits, "It fits, with 25 % of the memory to spare."),
            (Verdict::FitsBarely, "It fits with less than 5 % to spare"),
            (Verdict::DoesNotFit, "It does not fit: it needs at least 3.0 GiB and a chip has 4.0 GiB."),
            (Verdict::Unknown, "That could not be told."),
        ] {
            assert!(report(vec![judged("v5e-1", verdict)]).html().unwrap().contains(words), "{words}");
        }
    }

    #[test]
    fn several_slices_stand_side_by_side() {
        let mut slices = vec![judged("v5e-1", Verdict::DoesNotFit), judged("v6e-1", Verdict::Fits)];
        crate::judge::prices::rank(&mut slices);
        let page = report(slices).html().unwrap();
        let at = |text: &str| page.find(text).unwrap();
        assert!(at("Slices side by side") < at("v6e-1") && at("v6e-1") < at("v5e-1"));
        assert!(page.contains("href=\"#slice-1\"") && page.contains("id=\"slice-1\""));
    }
}
