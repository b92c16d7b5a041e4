//! What chips cost, and so what a step costs at least: one table, which `docs/preflight.md` shows, and which a file of the
//! user's overrides.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::answer::{Judged, Price};
use crate::hardware::gpus::GPUS;
use crate::hardware::{CHIPS, GPU_PREFIX, Slice, named};
use crate::verdict::Verdict;

/// The vendor's price of a kind of chip.
#[derive(Debug)]
pub(crate) struct Listed {
    /// The chip's name.
    chip: &'static str,
    /// On demand, in USD.
    usd_per_chip_hour: f64,
    /// Where it holds; other regions cost up to 45 % more.
    region: &'static str,
}

/// On demand, without commitments and discounts. `cloud.google.com/tpu/pricing` is where such prices are said. These were
/// read on 21 November 2026 from what others had read there (17 September 2026: v5e, v5p, v6e, tpu7x) and in the vendor's
/// list of what it bills (SkyPilot's catalogue: v4, v5e, v5p, v6e).
const PRICES: &[Listed] = &[
    Listed { chip: "v4", usd_per_chip_hour: 3.22, region: "us-central2" },
    Listed { chip: "v5e", usd_per_chip_hour: 1.2, region: "us-central1" },
    Listed { chip: "v5p", usd_per_chip_hour: 4.2, region: "us-central1" },
    Listed { chip: "v6e", usd_per_chip_hour: 2.7, region: "us-east1" },
    Listed { chip: "tpu7x", usd_per_chip_hour: 12.0, region: "us-central1" },
];

/// When the table was read.
const READ: &str = "2026-11-21";

/// A chip in the user's file.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Own {
    usd_per_chip_hour: f64,
}

/// The prices of the user's file; those of the table where it says nothing.
#[derive(Debug, Default)]
pub(crate) struct Prices {
    own: BTreeMap<String, f64>,
}

impl Prices {
    /// Reads a file.
    pub(crate) fn read(file: &Path) -> anyhow::Result<Prices> {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        Prices::parse(&text).with_context(|| format!("{} is no list of prices", file.display()))
    }

    fn parse(text: &str) -> anyhow::Result<Prices> {
        let mut own = BTreeMap::new();
        for (name, Own { usd_per_chip_hour: usd }) in toml::from_str::<BTreeMap<String, Own>>(text)? {
            let lower = name.to_ascii_lowercase();
            let Some(chip) = named(lower.strip_prefix(GPU_PREFIX).unwrap_or(&lower)) else {
                let known: Vec<&str> = CHIPS.iter().chain(GPUS).map(|c| c.name).collect();
                bail!("chip `{name}` is unknown; chips are {}", known.join(", "));
            };
            if !usd.is_finite() || usd < 0.0 {
                bail!("{usd} USD is no price of `{name}`");
            }
            own.insert(chip.name.to_owned(), usd);
        }
        Ok(Prices { own })
    }

    /// What a slice costs whose step takes at least so many seconds; none if nobody knows its chip's price.
    pub(crate) fn of(&self, slice: &Slice, step_s: Option<f64>, run_steps: Option<u64>) -> Option<Price> {
        let chip = slice.chip()?;
        let listed = PRICES.iter().find(|p| p.chip == chip.name);
        let own = self.own.get(chip.name).copied();
        let usd_per_chip_hour = own.or(listed.map(|p| p.usd_per_chip_hour))?;
        let usd_per_hour = usd_per_chip_hour * f64::from(slice.chips);
        let usd_per_step = step_s.map(|s| usd_per_hour * s / 3600.0);
        Some(Price {
            usd_per_chip_hour,
            source: if own.is_some() { "file" } else { "list" },
            region: listed.filter(|_| own.is_none()).map(|p| p.region),
            read: own.is_none().then_some(READ),
            usd_per_hour,
            usd_per_step,
            usd_per_run: usd_per_step.zip(run_steps).map(|(usd, n)| usd * n as f64),
        })
    }
}

/// Gives each slice its rank: what fits comes first, then the cheaper step, then the quicker one, then the cheaper hour.
pub(crate) fn rank(slices: &mut [Judged]) {
    let mut order: Vec<usize> = (0..slices.len()).collect();
    order.sort_by(|&a, &b| compare(&slices[a], &slices[b]));
    order.into_iter().enumerate().for_each(|(rank, i)| slices[i].rank = rank as u64 + 1);
}

fn compare(a: &Judged, b: &Judged) -> Ordering {
    let class = |s: &Judged| match s.verdict {
        Verdict::Fits | Verdict::FitsBarely => 0,
        Verdict::Unknown => 1,
        Verdict::DoesNotFit => 2,
    };
    let step = |s: &Judged| s.price.as_ref().and_then(|p| p.usd_per_step);
    let hour = |s: &Judged| s.price.as_ref().map(|p| p.usd_per_hour);
    let least = |a: Option<f64>, b: Option<f64>| match (a, b) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        (a, b) => b.is_some().cmp(&a.is_some()),
    };
    // A price on one side only says nothing: then the times decide.
    let steps =
        if step(a).is_some() && step(b).is_some() { least(step(a), step(b)) } else { Ordering::Equal };
    class(a).cmp(&class(b)).then(steps).then(least(a.least_s(), b.least_s())).then(least(hour(a), hour(b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::Step;
    use crate::hardware::{Chip, Work};

    #[test]
    fn a_step_costs_what_the_slice_does_in_its_time() {
        let slice = Slice::parse("v5e-8").unwrap();
        let price = Prices::default().of(&slice, Some(3.6), Some(1000)).unwrap();
        assert_eq!((price.usd_per_chip_hour, price.usd_per_hour), (1.2, 9.6));
        assert!((price.usd_per_step.unwrap() - 0.0096).abs() < 1e-12);
        assert!((price.usd_per_run.unwrap() - 9.6).abs() < 1e-9);
        assert_eq!((price.source, price.region, price.read), ("list", Some("us-central1"), Some(READ)));
        assert_eq!(Prices::default().of(&Slice::parse("cpu").unwrap(), Some(1.0), None), None);
    }

    #[test]
    fn a_file_overrides_the_table() {
        let prices = Prices::parse("[trillium]\nusd_per_chip_hour = 0.5\n").unwrap();
        let of = |name: &str| prices.of(&Slice::parse(name).unwrap(), None, Some(9)).unwrap();
        let own = of("v6e-4");
        assert_eq!((own.usd_per_hour, own.source, own.region, own.usd_per_run), (2.0, "file", None, None));
        assert_eq!(of("v5e-1").source, "list");
        for file in ["[h200]\nusd_per_chip_hour = 3", "[\"cuda:h200\"]\nusd_per_chip_hour = 3"] {
            let price =
                Prices::parse(file).unwrap().of(&Slice::parse("cuda:h200-8").unwrap(), Some(3.6), None);
            assert_eq!(price.map(|p| (p.usd_per_hour, p.source)), Some((24.0, "file")));
        }
        assert_eq!(prices.of(&Slice::parse("cuda:h200").unwrap(), None, None), None);
        for wrong in
            ["[v6]\nusd_per_chip_hour = 1", "[v6e]\nusd = 1", "[v6e]\nusd_per_chip_hour = -1", "v6e = 1"]
        {
            assert!(Prices::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_cheapest_that_fits_is_first() {
        let judged = |name: &str, verdict, step_s: Option<f64>| {
            let slice = Slice::parse(name).unwrap();
            let mut judged = Judged { verdict, ..Judged::unknown(&slice, String::new()) };
            judged.step =
                Some(Step { work: Work { roofline_s: step_s, ..Work::default() }, ..Step::default() });
            judged.price = Prices::default().of(&slice, step_s, None);
            judged
        };
        let mut slices = [
            judged("v6e-1", Verdict::DoesNotFit, Some(0.1)),
            judged("v5p-8", Verdict::Fits, Some(1.0)),
            judged("v5e-1", Verdict::Unknown, None),
            judged("v5e-4", Verdict::FitsBarely, Some(1.0)),
            judged("cpu", Verdict::Fits, None),
        ];
        rank(&mut slices);
        assert_eq!(slices.map(|s| s.rank), [5, 2, 4, 1, 3]);
    }

    #[test]
    fn the_documentation_has_this_table() {
        let page = include_str!("../../../../docs/preflight.md");
        for p in PRICES {
            let row = format!("| {} | {:.2} | {} |", p.chip, p.usd_per_chip_hour, p.region);
            assert!(page.contains(&row), "docs/preflight.md lacks\n{row}");
        }
        let priced = |c: &&Chip| PRICES.iter().any(|p| p.chip == c.name);
        let free: Vec<&str> = CHIPS.iter().filter(|c| !priced(c)).map(|c| c.name).collect();
        assert_eq!(free, ["v3"], "a chip without a price");
    }
}
